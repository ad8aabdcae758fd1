"""Configuration: every mistake names its path, its reason and what to write instead."""

import re
from pathlib import Path
from typing import Any

import pytest

from protocol import config
from protocol.errors import ConfigError

GOOD: dict[str, Any] = {
    "models": {"m": {"kind": "reference"}},
    "workers": [{"name": "w0"}, {"name": "w1", "models": ["m"], "threads": 2}],
}

MISTAKES: list[tuple[Any, str]] = [
    ([], r"x\.yaml: a mapping is expected at the top, got list"),
    ({}, "models: Field required"),
    ({"models": {}}, "models: Dictionary should have at least 1 item"),
    ({**GOOD, "worker": []}, r"worker: unknown key; did you mean 'workers'\?"),
    ({"models": {"m": {"knd": "x"}}}, r"models\.m\.knd: unknown key; did you mean 'kind'\?"),
    ({**GOOD, "limits": {"max_row": 1}}, r"limits\.max_row: unknown key; did you mean 'max_rows'"),
    ({**GOOD, "gateway": {"prot": 1}}, r"gateway\.prot: unknown key; did you mean 'port'\?"),
    ({**GOOD, "gateway": {"port": 70000}}, r"gateway\.port: .*less than or equal to 65535.*70000"),
    ({**GOOD, "workers": [{"name": "w", "device": "gpu"}]}, r"workers\.0\.device: .*got 'gpu'"),
    ({**GOOD, "workers": [{"name": "w", "zzz": 1}]}, r"workers\.0\.zzz: unknown key; known: depth"),
    ({**GOOD, "workers": [{"name": "w"}, {"name": "w"}]}, "workers: names must differ"),
    ({**GOOD, "workers": []}, "workers: at least one is needed, or 'auto'"),
    ({**GOOD, "workers": "all"}, "workers: "),
    (
        {"models": {"alpha": {}}, "workers": [{"name": "w", "models": ["alpah"]}]},
        r"workers\.w\.models: no model 'alpah'; did you mean 'alpha'\?",
    ),
    (
        {"models": {"a": {}, "b": {}}, "workers": [{"name": "w", "models": ["a"]}]},
        "no worker serves model 'b': add it to a worker's models",
    ),
    ({"models": {"a/b": {}}}, "model name 'a/b': 1 to 200 characters without '/'"),
    ({**GOOD, "name": "No Good"}, "name: .*got 'No Good'"),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES, ids=[m[:40] for _, m in MISTAKES])
def test_a_mistake_is_explained(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.parse(data, "x.yaml")
    assert str(e.value).startswith("x.yaml: ")
    assert re.search(message, str(e.value)), str(e.value)


def test_defaults_and_values() -> None:
    c = config.parse(GOOD)
    assert c.supervision.silence_ms == 2000
    assert c.gateway is not None
    assert c.gateway.port == 8000
    assert isinstance(c.workers, tuple)
    assert [w.name for w in c.workers] == ["w0", "w1"]
    assert config.parse({**GOOD, "gateway": None}).gateway is None


def test_it_is_frozen_and_survives_json() -> None:
    c = config.parse(GOOD)
    with pytest.raises(Exception, match="frozen"):
        c.name = "other"  # type: ignore[misc]
    assert config.DaemonConfig.model_validate_json(c.model_dump_json()) == c


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot read the configuration: No such"):
        config.load(tmp_path / "nope.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not valid YAML"):
        config.load(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        config.load(bad)


def test_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    c = config.parse({**GOOD, "name": "blue"})
    assert config.runtime_dir(c) == tmp_path / "podium" / "blue"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert config.runtime_dir(c).name == "blue"
    assert config.runtime_dir(config.parse({**GOOD, "runtime_dir": "/x"})) == Path("/x")

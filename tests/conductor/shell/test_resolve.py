"""`auto` becomes workers; devices, threads and files are settled before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from conductor.shell.resolve import preflight, resolve, visible_gpus
from protocol.config import DaemonConfig, WorkerConfig, parse
from protocol.errors import ConfigError

REFERENCE = {"reference": {"kind": "reference"}}


def config(**more: Any) -> DaemonConfig:
    return parse({"models": REFERENCE, "runtime_dir": "/tmp/x", **more})


def workers(c: DaemonConfig) -> list[tuple[str, str, int | None]]:
    assert c.workers != "auto"
    return [(w.name, w.device, w.threads) for w in c.workers]


def test_auto_is_one_worker_per_gpu_or_one_with_all_cores() -> None:
    assert workers(resolve(config(), gpus=0, cores=8)) == [("w0", "cpu", 8)]
    assert workers(resolve(config(), gpus=2, cores=8)) == [
        ("w0", "cuda:0", 4), ("w1", "cuda:1", 4),
    ]  # fmt: skip


def test_cores_are_shared_by_cpu_workers_and_never_none() -> None:
    three = [{"name": f"w{i}"} for i in range(3)]
    assert [t for _, _, t in workers(resolve(config(workers=three), gpus=0, cores=8))] == [2, 2, 2]
    assert [t for _, _, t in workers(resolve(config(workers=three), gpus=0, cores=2))] == [1, 1, 1]
    own = [{"name": "a", "threads": 5}, {"name": "b"}]
    assert [t for _, _, t in workers(resolve(config(workers=own), gpus=0, cores=4))] == [5, 2]


def test_an_asynchronous_cpu_is_no_gpu_and_shares_the_cores() -> None:
    two = [{"name": "a", "device": "cpu-async"}, {"name": "b"}]
    resolved = resolve(config(workers=two), gpus=0, cores=8)
    assert workers(resolved) == [("a", "cpu-async", 4), ("b", "cpu", 4)]


def test_a_gpu_that_is_not_there_is_named() -> None:
    one = [{"name": "w0", "device": "cuda:1"}]
    with pytest.raises(ConfigError, match=r"workers\.w0\.device: cuda:1 is not there.*1 visible"):
        resolve(config(workers=one), gpus=1, cores=2)
    with pytest.raises(ConfigError, match="none is visible"):
        resolve(config(workers=[{"name": "w0", "device": "cuda"}]), gpus=0, cores=2)


def test_resolving_survives_the_file_that_children_read(tmp_path: Path) -> None:
    from protocol.config import load

    resolved = resolve(config(), gpus=0, cores=3)
    path = tmp_path / "config.json"
    path.write_text(resolved.model_dump_json())
    again = load(path)
    assert again == resolved
    assert again.workers == (WorkerConfig(name="w0", threads=3),)


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, 3), ("", 0), ("0", 1), ("2,0", 2), ("0,1,2,7", 3), ("1,-1,2", 1), ("-1", 0),
        ("GPU-1a2b,GPU-3c4d", 2),
    ],
)  # fmt: skip
def test_visible_gpus_are_the_chosen_of_those_present(
    tmp_path: Path, chosen: str | None, seen: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environment, tmp_path) == seen


def test_no_gpus_are_none(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 0


def test_preflight_finds_files_and_says_which_model_lacks_them(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    good = parse({
        "models": {**REFERENCE, "m": {"source": str(tmp_path / "m.gguf")}}, "runtime_dir": "/tmp/x",
    })  # fmt: skip
    assert preflight(good) == {"reference": None, "m": tmp_path / "m.gguf"}
    bad = parse({"models": {"m": {"source": str(tmp_path / "n.gguf")}}, "runtime_dir": "/tmp/x"})
    with pytest.raises(ConfigError, match=r"models\.m\.source.*n\.gguf.*does not exist"):
        preflight(bad)
    with pytest.raises(ConfigError, match=r"models\.m\.source: empty"):
        preflight(parse({"models": {"m": {}}, "runtime_dir": "/tmp/x"}))
    with pytest.raises(ConfigError, match="choose a shorter runtime_dir"):
        preflight(config(runtime_dir="/tmp/" + "x" * 120))

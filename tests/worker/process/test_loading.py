"""From the configuration to loaded models: what is refused, what is sized, who computes."""

import json
from pathlib import Path

import pytest
import torch

from protocol.config import parse
from protocol.errors import ConfigError
from tests.support.worker_rig import QuietLog
from worker.device.cpu import CpuDevice
from worker.engine.engine import Engine
from worker.process import exit_status
from worker.process.app import Worker, run
from worker.process.loading import (
    load_models,
    make_device,
    own_section,
    placed_models,
    resolve_dtype,
)


def config(**changes):
    given = {
        "models": {"m": {"kind": "reference"}, "n": {"kind": "reference", "pages": 8}},
        "workers": [{"name": "w0", "models": ["n"]}, {"name": "w1"}],
    }
    return parse({**given, **changes})


def test_a_worker_finds_its_section_and_its_models() -> None:
    c = config()
    assert list(placed_models(c, own_section(c, "w0"))) == ["n"]
    assert list(placed_models(c, own_section(c, "w1"))) == ["m", "n"]
    with pytest.raises(ConfigError, match=r"none is called 'w7'; known: \['w0', 'w1'\]"):
        own_section(c, "w7")
    with pytest.raises(ConfigError, match="was not resolved"):
        own_section(config(workers="auto"), "w0")


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="device cuda:63: not there"):
        make_device("cuda:63")


def test_dtype_auto_is_float32_on_a_cpu() -> None:
    model = config().models["m"]
    assert resolve_dtype(model, CpuDevice()) is torch.float32
    named = model.model_copy(update={"dtype": "bfloat16"})
    assert resolve_dtype(named, CpuDevice()) is torch.bfloat16


def test_pages_come_from_the_configuration() -> None:
    engine = Engine(CpuDevice())
    told: list[tuple] = []
    models = config().models
    load_models(engine, {"n": models["n"]}, lambda phase, **figures: told.append((phase, figures)))
    assert engine.model_spec("n").pages == 8
    assert ("pages", {"model": "n"}) in told
    engine.shutdown()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"kind": "refrence"}, "did you mean 'reference'"),
        ({"kind": "decoder_lm", "source": "/nowhere.gguf"}, "/nowhere.gguf"),
        ({"kind": "reference", "options": {"keys": 1}}, "unknown option 'keys'"),
    ],
)
def test_what_a_restart_cannot_help_is_a_config_error(model, words: str) -> None:
    engine = Engine(CpuDevice())
    models = config(models={"m": model}, workers=[{"name": "w0"}]).models
    with pytest.raises(ConfigError, match=words):
        load_models(engine, models, lambda phase, **figures: None)


def test_one_thread_alone_has_a_team() -> None:
    c = config(workers=[{"name": "w0", "threads": 3}])
    worker = Worker(c, own_section(c, "w0"), 1, QuietLog())  # type: ignore[arg-type]
    worker.load()
    assert worker.gpu.call(torch.get_num_threads) == 3
    assert torch.get_num_threads() == 1
    assert worker.gpu.stop()
    worker.engine.shutdown()


def test_a_failure_to_load_is_one_line_and_status_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_args: object) -> None:
        raise MemoryError("no room for the weights")

    monkeypatch.setattr("worker.process.app.load_models", breaks)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"models": {"m": {"kind": "reference"}}, "workers": [{"name": "w"}]})
    )
    status = run(
        config_path=str(path), name="w", life=1, control="ipc:///nowhere", death_fd=None,
        log_level=None,
    )  # fmt: skip
    assert status == exit_status.FAILED
    assert capfd.readouterr().err == (
        "[ERROR] cannot start: MemoryError: no room for the weights\n"
    )

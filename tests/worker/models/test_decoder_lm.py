from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import ConfigError
from tests.parity.engine_driver import EngineDriver
from tests.worker.models.llama_files import HEAD_DIM, tensors, write_gguf, write_hf
from worker.api.inputs import RequestInfo
from worker.api.model import DONE, BuildContext, LoadedModel, Next
from worker.models import decoder_lm
from worker.models.weights.hf_config import llama3_factors

CPU = torch.device("cpu")
ROPE = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def build(
    source: Path,
    context: int | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Any = None,
    **options: Any,
) -> LoadedModel:
    given = {} if progress is None else {"progress": progress}
    return decoder_lm.build(BuildContext("m", str(source), CPU, dtype, context, options, **given))


def logits_of(model: LoadedModel) -> torch.Tensor:
    driver = EngineDriver(model, pages=16)
    found = [driver.prefill({1: [3, 1, 4, 1, 5, 9, 2, 6]}).columns["logits"]]
    found += [driver.decode([1]).columns["logits"] for _ in range(6)]
    return torch.cat(found)


def test_what_is_built(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    model = build(write_hf(tmp_path / "m"), progress=lambda *a: told.append(a))
    model.graph.validate()
    assert [(w.name, w.standing, w.then) for w in model.graph.walks] == [
        ("prefill", False, "decode"),
        ("decode", True, None),
    ]
    assert (model.vocab, model.context, model.eos) == (64, 64, (2,))
    assert model.next_walk("prefill", {}) == Next("decode")
    assert model.next_walk("decode", {"reason": "stop"}) == DONE
    assert told == [(i, 20, "tensors") for i in range(21)]
    assert not any(p.requires_grad for p in model.submodules["decoder"].parameters())


@pytest.mark.parametrize(("configured", "limit"), [(None, 64), (16, 16), (64, 64), (1000, 64)])
def test_context(tmp_path: Path, configured: int | None, limit: int) -> None:
    model = build(write_hf(tmp_path / "m"), context=configured)
    assert model.context == limit
    kv = next(r for r in model.resources if r.key == "kv")
    assert kv.options["context"] == limit


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_both_formats_are_the_same_model(tmp_path: Path, tied: bool, scaled: bool) -> None:
    """Also with llama3 rope scaling, which GGUF carries as a tensor of divisors."""
    rope = {"rope_type": "llama3", "original_max_position_embeddings": 16, **ROPE}
    hf = write_hf(
        tmp_path / "m",
        tensors(tied),
        tie_word_embeddings=tied,
        rope_scaling=rope if scaled else None,
    )
    factors = llama3_factors(1000.0, HEAD_DIM, factor=4.0, low=1.0, high=4.0, trained=16)
    extra = {"rope_freqs.weight": np.array(factors, np.float32)} if scaled else {}
    gg = write_gguf(tmp_path / "m.gguf", tensors(tied), extra=extra)
    a, b = (logits_of(build(p, keep_logits=True)) for p in (hf, gg))
    assert a.std() > 0.1
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_bfloat16(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    exact, rounded = (
        logits_of(build(folder, dtype=d, keep_logits=True))[0]
        for d in (torch.float32, torch.bfloat16)
    )
    assert rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max()


def test_logits_are_kept_only_if_asked(tmp_path: Path) -> None:
    driver = EngineDriver(build(write_hf(tmp_path / "m")), pages=4)
    assert set(driver.prefill({1: [5]}).columns) == {"tokens"}


def test_an_empty_prefill_fails_alone(tmp_path: Path) -> None:
    node = build(write_hf(tmp_path / "m")).submodules["decoder"]
    with pytest.raises(ValueError, match="at least one token"):
        node.prepare_inputs(RequestInfo(1, "prefill", {}))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"keep_logit": True}, "unknown option 'keep_logit'"), ({"keep_logits": 1}, "must be bool")],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(write_hf(tmp_path / "m"), **options)


def test_sources_that_are_no_model(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    with pytest.raises(ConfigError, match="no such file or folder"):
        build(tmp_path / "absent")
    with pytest.raises(ConfigError, match="name the folder that holds it"):
        build(folder / "model.safetensors")


def test_a_refusal_comes_before_any_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_hf(tmp_path / "m", num_hidden_layers=3)
    monkeypatch.setattr(decoder_lm, "Llama", lambda *a, **k: pytest.fail("memory was allocated"))
    with pytest.raises(ConfigError, match="9 missing"):
        build(folder)

"""Small random Llama models through the Engine, against transformers: every logit of every step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.parity.engine_driver import EngineDriver, load

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
STEPS = 20
BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,  # large, so that a wrong one shows
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 700.0}},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "wide_heads": {"head_dim": 16, "num_key_value_heads": 6, "dtype": "bfloat16"},
    "sharded": {"max_shard_size": "40KB"},
}


@pytest.fixture(params=MODELS, scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, EngineDriver]]:
    """The reference, and the same checkpoint in an engine."""
    options = dict(MODELS[request.param])
    shard = options.pop("max_shard_size", "1GB")
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(BASE | options)))
    for name, p in model.named_parameters():
        if "norm" in name:  # all ones when made: equal ones would hide a mix-up
            torch.nn.init.uniform_(p, 0.5, 1.5)
    model = model.to(getattr(torch, options.get("dtype", "float32")))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size=shard)
    assert (folder / "model.safetensors.index.json").exists() == (request.param == "sharded")
    driver = EngineDriver(load(folder, keep_logits=True))
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    yield model.eval(), driver
    driver.engine.shutdown()


def prompt(length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, BASE["vocab_size"], (length,), generator=draw).tolist()


@torch.no_grad()
def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    """[n, V]: the logits after every token."""
    return model(torch.tensor([tokens])).logits[0]


class Transcript:
    """What one request was given and gave: its tokens, and the logits of each."""

    def __init__(self, tokens: list[int]) -> None:
        self.prompt, self.tokens, self.logits = tokens, list[int](), list[torch.Tensor]()

    def add(self, outputs: dict[str, list[torch.Tensor]]) -> None:
        self.tokens.append(int(outputs["tokens"][0]))
        self.logits.append(outputs["logits"][0][0])

    def check(self, model: Any) -> None:
        expected = reference(model, self.prompt + self.tokens[:-1])[len(self.prompt) - 1 :]
        got = torch.stack(self.logits)
        assert got.dtype == torch.float32
        assert expected.std() > 0.5, "logits this small prove nothing"
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        assert self.tokens == got.argmax(-1).tolist()


def run(driver: EngineDriver, told: dict[int, Transcript], steps: int = STEPS) -> None:
    for _ in range(steps):
        out = driver.decode(list(told))
        for r, t in told.items():
            t.add(out[r])


def test_prefill_and_every_decode_step(pair: tuple[Any, EngineDriver]) -> None:
    model, driver = pair
    t = Transcript(prompt(11, seed=1))
    t.add(driver.prefill({1: t.prompt})[1])
    run(driver, {1: t})
    driver.remove(1)
    t.check(model)


def test_requests_of_different_lengths_share_every_step(pair: tuple[Any, EngineDriver]) -> None:
    model, driver = pair
    told = {r: Transcript(prompt(n, seed=n)) for r, n in enumerate((1, 16, 17, 40), 1)}
    first = driver.prefill({r: t.prompt for r, t in told.items()})
    for r, t in told.items():
        t.add(first[r])
    run(driver, told)
    for r, t in told.items():
        driver.remove(r)
        t.check(model)


def test_prefill_in_chunks_beside_others(pair: tuple[Any, EngineDriver]) -> None:
    """A chunk that is not the last gives no output; the row beside it does."""
    model, driver = pair
    long, short = Transcript(prompt(40, seed=3)), Transcript(prompt(9, seed=4))
    first = driver.prefill({1: long.prompt[:16], 2: short.prompt}, waits=[1])
    assert list(first) == [2]
    short.add(first[2])
    assert not len(driver.prefill({1: long.prompt[16:17]}, waits=[1]))
    long.add(driver.prefill({1: long.prompt[17:]})[1])
    run(driver, {2: short, 1: long})
    for r, t in ((1, long), (2, short)):
        driver.remove(r)
        t.check(model)


def test_rows_join_and_leave_between_steps(pair: tuple[Any, EngineDriver]) -> None:
    model, driver = pair
    told = {r: Transcript(prompt(5 + r, seed=r)) for r in (1, 2, 3)}
    told[1].add(driver.prefill({1: told[1].prompt})[1])
    run(driver, {1: told[1]}, 3)
    first = driver.prefill({2: told[2].prompt, 3: told[3].prompt})
    told[2].add(first[2])
    told[3].add(first[3])
    run(driver, told, 5)
    driver.remove(2)
    run(driver, {3: told[3], 1: told[1]}, 5)
    for r in (1, 3):
        driver.remove(r)
    for t in told.values():
        t.check(model)

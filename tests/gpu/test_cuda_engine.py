"""The engine on a CUDA device, eager: the oracle, parity with transformers, and no hidden sync.

Run on a machine with a GPU: `scripts/test -m gpu`.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine_harness import Harness
from worker.api.model import BuildContext, LoadedModel
from worker.api.registry import load_builder
from worker.models.reference_hash import reference_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LLAMA = {
    "vocab_size": 997,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@pytest.fixture
def device() -> Iterator[Any]:
    from worker.device.cuda import CudaDevice

    d = CudaDevice(0)
    yield d
    d.close()


def build(kind: str, device: Any, source: str = "", dtype: Any = None, **options: Any) -> Any:
    context = BuildContext(
        "m", source, device.torch_device, dtype or torch.float32, None, options
    )  # fmt: skip
    return load_builder(kind)(context)


def test_reference_streams_are_the_oracles_in_any_company(device: Any) -> None:
    h = Harness(build("reference", device), pages=200, device=device)
    prompts = {r: [(7 * r + i) % 256 for i in range(5 * r)] for r in range(1, 8)}
    h.add(*prompts)
    h.step({r: prompts[r] for r in (1, 2, 3)})
    for n in range(20):
        if n == 5:
            h.step({r: prompts[r] for r in (4, 5, 6, 7)})
        rows = [1, 2, 3] if n <= 5 else [7, 1, 5, 2, 6, 3, 4]
        h.step(rows[: 1 + n % len(rows)])
    for r, tokens in prompts.items():
        assert h.out[r] == reference_tokens(tokens, len(h.out[r]))
    h.remove(*prompts)
    assert h.engine.statistics()["pages_used"] == 0
    h.engine.shutdown()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random checkpoint, and transformers' model of it on the same card."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model.eval().cuda()


def greedy(h: Harness, prompts: dict[int, list[int]], steps: int) -> None:
    h.add(*prompts)
    h.step(prompts)
    for _ in range(steps - 1):
        h.step(list(prompts))


def prompts_of(n: int) -> dict[int, list[int]]:
    draw = torch.Generator().manual_seed(11)
    return {
        r: torch.randint(0, LLAMA["vocab_size"], (3 + 9 * r,), generator=draw).tolist()
        for r in range(1, n + 1)
    }


@torch.no_grad()
def test_fp32_greedy_tokens_are_transformers(device: Any, llama: tuple[Path, Any]) -> None:
    folder, model = llama
    loaded: LoadedModel = build("decoder_lm", device, str(folder), keep_logits=True)
    h = Harness(loaded, pages=400, device=device)
    prompts = prompts_of(8)
    greedy(h, prompts, 48)
    for r, tokens in prompts.items():
        ids = torch.tensor([tokens], device="cuda")
        out = model.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=None)
        assert h.out[r] == out[0, len(tokens) :].tolist(), r
    h.engine.shutdown()


@torch.no_grad()
def test_bf16_logits_are_as_near_to_fp32_as_transformers(
    device: Any, llama: tuple[Path, Any]
) -> None:
    """Both bf16 models are fed what the engine chose; each is compared with the fp32 one."""
    transformers = pytest.importorskip("transformers")
    folder, exact = llama
    rough = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rough = rough.cuda().eval()
    loaded = build("decoder_lm", device, str(folder), torch.bfloat16, keep_logits=True)
    h = Harness(loaded, pages=400, device=device)
    prompts = prompts_of(8)
    h.add(*prompts)
    steps = [h.step(prompts)] + [h.step(list(prompts)) for _ in range(31)]
    ours, theirs = list[torch.Tensor](), list[torch.Tensor]()
    for r, tokens in prompts.items():
        history = torch.tensor([tokens + h.out[r][:-1]], device="cuda")
        want = exact(history).logits[0, len(tokens) - 1 :].float()
        peer = rough(history).logits[0, len(tokens) - 1 :].float()
        got = torch.cat([b.outputs[r]["logits"][0] for b in steps]).float()
        ours.append((got - want).flatten())
        theirs.append((peer - want).flatten())
    error, peer_error = (float(torch.cat(x).square().mean().sqrt()) for x in (ours, theirs))
    print(f"root mean square error to fp32: ours {error:.4f}, transformers' {peer_error:.4f}")
    assert error < 1.2 * peer_error
    h.engine.shutdown()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_gpu_thread_never_waits_for_the_device(device: Any, llama: tuple[Path, Any]) -> None:
    """torch raises at every call that would synchronize (E26)."""
    h = Harness(build("decoder_lm", device, str(llama[0])), pages=400, device=device)
    prompts = prompts_of(6)
    h.add(1, 2, 3)
    h.add(4, 5, 6, temperature=0.8, top_k=20, top_p=0.9, seed=5)
    batches = [h.batch(prompts)]
    h.position = {r: len(t) for r, t in prompts.items()}
    batches += [h.batch(list(prompts)) for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for b in batches:
            h.engine.prepare_batch(b)
            h.engine.exec_and_postprocess(b)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [b.error for b in batches] == [None] * len(batches)
    assert not any(b.failed_requests for b in batches)
    h.engine.shutdown()


def test_the_host_runs_ahead_and_the_copies_are_right(device: Any) -> None:
    """Steps are launched back to back; another thread reads their columns, in order."""
    h = Harness(build("reference", device), pages=100, device=device)
    h.add(1)
    prompt = [9, 8, 7]
    first = h.batch({1: prompt})
    h.position[1] = 3
    steps = [first] + [h.batch([1]) for _ in range(30)]
    read: list[int] = []

    def reader() -> None:
        with device.readback():
            for b in steps:
                assert b.outputs_ready.wait(10)
                read.append(int(device.to_host(b.outputs.columns["tokens"], b.completion_event)[0]))

    thread = threading.Thread(target=reader)
    thread.start()
    for i, b in enumerate(steps):
        b.per_request_info[1].position = 0 if i == 0 else 2 + i
        h.engine.prepare_batch(b)
        h.engine.exec_and_postprocess(b)
    thread.join(30)
    assert read == reference_tokens(prompt, 31)
    h.engine.shutdown()

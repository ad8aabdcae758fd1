"""Real engines, whole runs launched before the compute stream executes a single kernel.

So a step that took a value when it was launched, or a buffer that was used again too soon on the
host, gives other tokens than the plain CPU.
"""

import pytest
import torch

from tests.support.engine_harness import Harness, one_node, reference
from tests.support.sequencer import Sequencer
from tests.support.toy_decoder import ToyDecoder, toy_decoder
from tests.worker.models.llama_files import write_hf
from worker.api.model import BuildContext
from worker.api.registry import load_builder
from worker.device.cpu import CpuDevice
from worker.device.cpu_async import CpuAsyncDevice
from worker.models.reference_hash import reference_tokens

STEPS = 12
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "seed": 5}


def llama(tmp_path):
    context = BuildContext(
        "m", str(write_hf(tmp_path / "m")), torch.device("cpu"), torch.float32, None, {}
    )
    return load_builder("decoder_lm")(context)


MODELS = {"reference": lambda _: reference(), "toy": lambda _: toy_decoder(), "llama": llama}


class Ahead:
    """A harness on the cpu-async device that reads nothing until the end."""

    def __init__(self, model, device, seq=None, pages=40):
        self.h = Harness(model, pages=pages, device=device)
        self.h.engine.warmup()
        if seq is not None:
            device.synchronize()
            seq.hold("compute:*")
        self.launched = []

    def step(self, rows, **how):
        batch = self.h.batch(rows, **how)
        self.h.engine.prepare_batch(batch)
        spans = {rid: i.span for rid, i in batch.inputs.items()}
        self.h.engine.exec_and_postprocess(batch)
        self.h.engine.check()
        assert batch.error is None, batch.error
        for rid in batch.request_ids:
            self.h.position[rid] += spans[rid]
        for rid in batch.outputs:
            self.h.out[rid].append(-1)  # its value is not known yet
        self.launched.append(batch)
        return batch

    def read(self):
        """Each request's tokens, step by step."""
        tokens = {}
        for batch in self.launched:
            column = batch.outputs.columns.get("tokens")
            if column is None:
                continue
            values = self.h.engine.device.to_host(column, batch.completion_event).tolist()
            for rid, value in zip(batch.outputs.request_ids, values, strict=True):
                tokens.setdefault(rid, []).append(value)
        return tokens


@pytest.fixture
def seq():
    s = Sequencer()
    yield s
    s.open()


@pytest.fixture
def device(seq):
    d = CpuAsyncDevice(seq.gate)
    yield d
    seq.open()
    d.close()


def scenario(a: Ahead) -> None:
    """Chunks, joins and leaves; the pages of a request that left go to the next at once."""
    a.h.add(1, 2)
    a.h.add(3, **SAMPLED)
    a.step({1: [3] * 5, 2: [4] * 20}, partial=[2])
    a.step({2: [5] * 17, 3: [7]})
    for _ in range(STEPS):
        a.step([1, 2, 3])
    a.h.remove(2)
    a.h.add(4)
    a.step({4: [9, 8, 7] * 11})
    for _ in range(3):
        a.step([3, 4, 1])


@pytest.mark.parametrize("name", MODELS)
def test_everything_launched_ahead_gives_the_tokens_of_the_cpu(name, tmp_path, seq, device):
    plain = Ahead(MODELS[name](tmp_path), CpuDevice(), pages=9)
    scenario(plain)
    ahead = Ahead(MODELS[name](tmp_path), device, seq, pages=9)
    before = seq.passed("compute:*")
    scenario(ahead)
    assert seq.passed("compute:*") == before  # nothing ran yet
    seq.release("compute:*")
    expected = plain.read()
    assert ahead.read() == expected
    assert [len(expected[r]) for r in (1, 2, 3, 4)] == [16, 13, 16, 4]


def test_a_batch_that_is_tried_again_in_halves_behind_steps_in_flight(seq, device):
    fault = {"point": "forward", "when_token": 200, "at": 4, "times": 1}
    a = Ahead(reference(faults=[fault]), device, seq)
    prompts = {1: [40, 41], 2: [50] * 17, 3: [200, 60], 4: [70]}
    a.h.add(*prompts)
    a.step(prompts)
    for _ in range(STEPS):
        assert not a.step(list(prompts)).failed_requests
    seq.release("compute:*")
    assert a.h.engine.models["m"].submodules["decoder"].faults.faults[0].fired == 1
    assert a.read() == {r: reference_tokens(p, STEPS + 1) for r, p in prompts.items()}


def test_a_request_that_fails_in_flight_leaves_the_others_alone(seq, device):
    fault = {"point": "forward", "when_token": 200, "at": 4}
    a = Ahead(reference(faults=[fault]), device, seq)
    prompts = {1: [40, 41], 2: [50] * 17, 3: [200, 60], 4: [70]}
    a.h.add(*prompts)
    a.step(prompts)
    rows = list(prompts)
    for _ in range(STEPS):
        failed = a.step(rows).failed_requests
        rows = [r for r in rows if r not in failed]
        a.h.remove(*failed)
    seq.release("compute:*")
    got = a.read()
    assert len(got[3]) == 4
    assert got == {r: reference_tokens(p, len(got[r])) for r, p in prompts.items()}
    assert rows == [1, 2, 4]


class OneHostBuffer(ToyDecoder):
    """Planted: one host buffer for every step's tokens, written again while its copy is queued."""

    def __init__(self):
        super().__init__()
        self.words = memoryview(bytearray(8 * 64)).cast("q")
        self.host = torch.frombuffer(self.words, dtype=torch.int64)

    def preprocess(self, engine, inputs):
        if engine.infos[0].walk == "decode":
            return super().preprocess(engine, inputs)
        flat = [t for i in engine.infos for t in i.tokens]
        for i, token in enumerate(flat):
            self.words[i] = token
        return {"tokens": self.host[: len(flat)].clone()}


def test_a_host_buffer_that_is_written_again_too_soon_shows(seq, device):
    model = toy_decoder()

    def run(submodule, on, held=None):
        a = Ahead(one_node(submodule, *model.resources, vocab=40), on, held)
        a.h.add(1, 2)
        a.step({1: [3] * 5})
        a.step({2: [11] * 5})
        if held is not None:
            held.release("compute:*")
        return a.read()

    expected = run(ToyDecoder(), CpuDevice())
    assert run(OneHostBuffer(), CpuDevice()) == expected
    assert run(OneHostBuffer(), device, seq) != expected

import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from tests.support.engine_harness import reference
from worker.api.model import DONE, Next
from worker.models.reference import next_tokens, signed
from worker.models.reference_hash import EOS, mix, next_token, reference_tokens

KNOWN = [58, 107, 48, 32, 71, 116, 38, 48]
HISTORIES = st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=20), min_size=1, max_size=5)


@given(HISTORIES, st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2, 10]))
def test_the_tensor_rule_is_the_plain_rule(histories, key, eos_every):
    """Whatever lies beyond a history's length must not matter."""
    padded = torch.full((len(histories), 32), -(2**63) + 5)
    for i, h in enumerate(histories):
        padded[i, : len(h)] = torch.tensor(h)
    lengths = torch.tensor([len(h) for h in histories])
    got = next_tokens(padded, lengths, signed(mix(key)), eos_every)
    assert got.tolist() == [next_token(h, key, eos_every) for h in histories]


def test_known_tokens():
    """Golden: changing the rule breaks recorded runs."""
    assert reference_tokens([1, 2, 3], 8) == KNOWN
    assert reference_tokens([1, 2, 3], 8, key=1) != KNOWN
    assert all(32 <= t <= 126 for t in KNOWN)


def test_order_length_and_each_token_matter():
    base = [5, 6, 7, 8]
    others = [[6, 5, 7, 8], [5, 6, 7], [5, 6, 7, 9], [5, 6, 7, 8, 0], [0, 5, 6, 7, 8]]
    streams = [tuple(reference_tokens(p, 10)) for p in [base, *others]]
    assert len(set(streams)) == len(streams)


def test_tokens_are_spread_and_eos_comes_one_time_in_n():
    drawn = [next_token([i], eos_every=10) for i in range(5000)]
    eos = drawn.count(EOS)
    assert 400 < eos < 600
    assert len(set(drawn)) == 96
    assert reference_tokens([1], 10, eos_every=1) == [EOS]
    assert len(reference_tokens([1], 10, eos_every=1, stop_at_eos=False)) == 10


def test_walks():
    model = reference()
    model.graph.validate()
    assert model.graph.walk("prefill").then == "decode"
    assert model.graph.walk("decode").standing
    assert model.next_walk("prefill", {}) == Next("decode")
    assert model.next_walk("prefill", {"stop": ["decode"]}) is DONE
    assert model.next_walk("decode", {}) is DONE
    assert model.context == 4096


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"point": "forwrd"}, "no point 'forwrd'; did you mean 'forward'"),
        ({"point": "forward", "action": "rise"}, "did you mean 'raise'"),
        ({"point": "forward", "wen_token": 1}, "did you mean 'when_token'"),
    ],
)
def test_faults_are_checked(fault, says):
    with pytest.raises(ConfigError, match=says):
        reference(faults=[fault])


DIES = """
from tests.support.engine_harness import Harness, reference
h = Harness(reference(faults=[{fault}]))
h.engine.warmup()
h.add(1, 2)
h.step({{1: [1]}})
h.step({{2: [200]}})
print("alive", not h.step([1, 2]).failed_requests)
"""


def run(fault):
    script = DIES.format(fault=fault)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


def test_a_fault_can_take_the_process(tmp_path):
    once = {"point": "forward", "when_token": 200, "action": "exit"}
    once["once_file"] = str(tmp_path / "fired")
    assert run(once) == (70, "")
    assert run(once) == (0, "alive True\n")
    segv = {"point": "prepare", "when_prompt": [200], "action": "segv"}
    assert run(segv)[0] == -signal.SIGSEGV


def test_a_hang_does_not_hold_the_interpreter():
    hang = {"point": "forward", "when_token": 200, "action": "hang"}
    script = "import threading, os\n" + DIES.format(fault=hang)
    script = script.replace("h.step({2", "threading.Timer(0.2, os._exit, (9,)).start()\nh.step({2")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 9
    assert done.stdout == ""

"""The reference model through the engine, against its plain twin, at any batch composition."""

import random

import pytest

from tests.support.engine_harness import Harness, reference
from worker.models.reference_hash import EOS, reference_tokens


def prompt_of(rid, n):
    return [(rid * 31 + i * 7) % 257 for i in range(n)]


def test_alone():
    h = Harness(reference(key=5))
    h.engine.warmup()
    h.add(1)
    h.step({1: prompt_of(1, 40)})
    for _ in range(40):
        h.step([1])
    assert h.out[1] == reference_tokens(prompt_of(1, 40), 41, key=5)


@pytest.mark.parametrize("seed", range(6))
def test_any_composition(seed):
    """Random prefills (whole and in chunks), decodes, leaves and joins over a small pool."""
    rnd = random.Random(seed)
    h = Harness(reference(key=seed), pages=60)
    prompts: dict[int, list[int]] = {}
    waiting: dict[int, list[int]] = {}
    running: list[int] = []
    next_rid, finished = 1, 0
    for _ in range(150):
        if len(running) + len(waiting) < 6:
            prompts[next_rid] = waiting[next_rid] = prompt_of(next_rid, rnd.randint(1, 70))
            h.add(next_rid, max_tokens=40)
            next_rid += 1
        if waiting and rnd.random() < 0.4:
            rids = rnd.sample(sorted(waiting), rnd.randint(1, len(waiting)))
            chunks = {r: waiting[r][: rnd.choice([1, 16, 17, 99])] for r in rids}
            rest = {r: waiting[r][len(chunks[r]) :] for r in rids}
            if h.step(chunks, partial=[r for r in rids if rest[r]]).admit_error is None:
                for r in rids:
                    waiting[r] = rest[r]
                    if not rest[r]:
                        del waiting[r]
                        running.append(r)
        elif running:
            rnd.shuffle(running)
            h.step(running[: rnd.randint(1, len(running))])
        for r in list(running):
            if len(h.out[r]) >= 30:
                assert h.out[r] == reference_tokens(prompts[r], len(h.out[r]), key=seed)
                h.remove(r)
                running.remove(r)
                finished += 1
    for r in running:
        assert h.out[r] == reference_tokens(prompts[r], len(h.out[r]), key=seed)
    assert finished > 3
    h.remove(*range(1, next_rid))
    assert h.engine.statistics()["pages_used"] == 0


def test_a_steady_batch_of_uneven_rows():
    """Rows cross page borders at different steps while nothing else changes."""
    h = Harness(reference())
    prompts = {rid: prompt_of(rid, n) for rid, n in ((1, 60), (2, 10), (3, 1))}
    h.add(*prompts)
    h.step(prompts)
    for _ in range(40):
        h.step([1, 2, 3])
    for rid, prompt in prompts.items():
        assert h.out[rid] == reference_tokens(prompt, 41)


def test_eos_by_the_hash():
    h = Harness(reference(eos_every=9))
    h.add(1)
    h.step({1: [1, 2, 3]})
    while h.out[1][-1] != EOS:
        h.step([1])
    assert h.out[1] == reference_tokens([1, 2, 3], 1000, eos_every=9)


def test_replay_with_history_continues_the_same_stream():
    h = Harness(reference())
    h.add(1)
    h.step({1: [9, 8, 7]})
    for _ in range(9):
        h.step([1])
    h.remove(1)
    h.add(2)
    h.step({2: [9, 8, 7, *h.out[1]]})
    for _ in range(5):
        h.step([2])
    assert h.out[1] + h.out[2] == reference_tokens([9, 8, 7], 16)


def test_statistics_and_spec():
    h = Harness(reference(context=64), pages=7)
    spec = h.engine.model_spec("m")
    assert (spec.pages, spec.page_tokens, spec.context, spec.eos) == (7, 16, 64, (EOS,))
    h.add(1)
    batch = h.step({1: [1] * 17})
    h.engine.finalize_batch(batch)
    stats = h.engine.statistics()
    assert (stats["pages_total"], stats["pages_free"], stats["pages_used"]) == (7, 5, 2)
    assert stats["steps"] == 1
    assert stats["requests"] == 1
    forward = stats["step_seconds"]["forward"]
    assert sum(forward["counts"]) == 1
    assert forward["sum"] == batch.exec_timings.forward > 0

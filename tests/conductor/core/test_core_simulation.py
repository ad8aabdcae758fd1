"""Random worlds: every interleaving that a seed draws keeps the protocol's promises.

Faults are drawn along with ordinary progress; afterwards the world is let go on until nothing is
open. `check_answers` then holds every stream to one terminal event and the right tokens.
"""

import pytest

from protocol.messages import Kind
from tests.support.conductor_driver import config, spec
from tests.support.conductor_harness import SimOwner, Simulation
from tests.support.conductor_sim_worker import POISON

STEPS = 200


def world(seed: int, workers: int = 2, owners: int = 1, **limits: int) -> Simulation:
    cfg = config(**{"prefill_tokens": 16, "max_rows": 8, **limits})
    sim = Simulation(cfg, spec(pages=48), seed)
    for i in range(workers):
        sim.start_worker(f"w{i}")
    for i in range(owners):
        sim.start_owner(f"gw{i}")
    while moves := sim.moves():
        sim.deliver(*moves[0])
    return sim


def order(sim: Simulation, owner: SimOwner, **more: object) -> int:
    r = sim.random
    prompt = [r.randrange(POISON) for _ in range(r.choice([1, 3, 12, 40]))]
    return sim.submit(owner, prompt, r.choice([1, 2, 9, 25]), stops=r.random() < 0.5, **more)


def disturb(sim: Simulation) -> None:
    """One thing that goes wrong, or that somebody wants."""
    r = sim.random
    owner = r.choice(list(sim.owners.values()))
    streams = [s for s in owner.streams if s not in owner.ended]
    worker = r.choice(list(sim.workers.values())) if sim.workers else None
    rows = list(worker.rows) if worker else []
    what = r.randrange(16)
    if what < 4:
        order(sim, owner, priority=r.choice([0, 0, 1]), deadline_ms=r.choice([0, 0, 300]))
    elif what == 4:
        order(sim, owner, replay=r.choice(["restart", "never"]))
    elif what == 5 and streams:
        owner.act(owner.book.cancel(r.choice(streams)))
    elif what == 6 and streams:  # a duplicate Submit
        s = owner.streams[r.choice(streams)]
        if owner.welcomed and s.submitted:
            owner.act([owner.book.submission(s, sim.now)])
    elif what == 7 and worker and sim.crashes + len(sim.starts) < 3:
        sim.kill(worker.life, outside=r.random() < 0.5)
        sim.crashes += 1
    elif what == 8 and worker:
        sim.reset(worker.life, notice=r.random() < 0.5)
    elif what == 9:
        sim.reset(owner.life, notice=r.random() < 0.5)
    elif what == 10 and len(sim.owners) > 1:
        sim.kill_owner(owner.life)
        sim.start_owner(owner.name + "'")
    elif what == 11 and worker and not worker.exiting:
        sim.drain_worker(worker, r.choice([0, 100]))
    elif what == 12 and worker and rows:
        worker.hold(r.choice(rows))
    elif what == 13 and worker:
        worker.resume_all()
    elif what == 14 and worker and rows:
        worker.give_up(r.choice(rows), r.choice([Kind.PREEMPTED, Kind.FAILED, Kind.REFUSED]))
    else:
        sim.pass_time(r.choice([0.05, 0.2, 0.7]))


def live_through(sim: Simulation, steps: int = STEPS) -> None:
    r = sim.random
    for _ in range(steps):
        if r.random() < 0.15:
            disturb(sim)
        moves = sim.moves()
        if moves and r.random() < 0.7:
            sim.deliver(*r.choice(moves))
        elif sim.workers and r.random() < 0.8:
            sim.step(r.choice(list(sim.workers.values())))
        else:
            sim.pass_time(0.01)
        sim.flush()


@pytest.mark.parametrize("seed", range(40))
def test_every_stream_ends_once_with_the_right_tokens(seed: int) -> None:
    sim = world(seed, workers=1 + seed % 3, owners=1 + seed % 2)
    live_through(sim)
    sim.settle()
    sim.check_answers()

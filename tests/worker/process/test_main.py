"""`python -m worker` as a process: serving over ipc, its end with its parent, exit statuses."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol import columns
from protocol.channel.zeromq import ZmqNetwork
from protocol.messages import Beat, Exit, Hello, Kind, Leaving, Open, Owners, Row, Run
from tests.support.worker_rig import BASES, DECODE, LIFE, FakeConductor, Owner
from worker.models.reference_hash import reference_tokens
from worker.process import exit_status

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
BOUND_S = 60.0


class Daemon:
    """A conductor and an owner on ipc, and one worker process."""

    def __init__(self, root: Path, **config: object) -> None:
        BASES.clear()
        self.root = root
        self.network = ZmqNetwork()
        self.control = f"ipc://{root}/c"
        self.conductor = FakeConductor(self.network.bind(self.control))
        self.owner = Owner(self.network, 1, f"ipc://{root}/o")
        self.read_end, self.write_end = os.pipe()
        self.config = root / "config.json"
        given = {
            "models": {"m": {"kind": "reference", "pages": 64}},
            "workers": [{"name": "w0", "threads": 1}],
            "gateway": None,
            **config,
        }
        self.config.write_text(json.dumps(given))
        self.process: subprocess.Popen[str] | None = None

    def command(self, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "worker", "--config", str(self.config), "--name", "w0",
            "--life", str(LIFE), "--control", self.control, "--death-fd", str(self.read_end), *more,
        ]  # fmt: skip

    def start(self, *more: str) -> "subprocess.Popen[str]":
        self.process = subprocess.Popen(
            self.command(*more), cwd=ROOT, pass_fds=(self.read_end,), text=True,
            stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return self.process

    def until(self, reached) -> None:
        limit = time.monotonic() + BOUND_S
        assert self.process is not None
        while not reached():
            assert time.monotonic() < limit, "it never comes to that"
            if self.process.poll() is not None:
                raise AssertionError(
                    f"exit {self.process.returncode}: {self.process.stderr.read()}"
                )
            select.select([self.conductor.channel, self.owner.channel], [], [], 0.05)
            self.listen()

    def listen(self) -> None:
        self.conductor.listen()
        self.owner.listen()

    def greet(self) -> None:
        self.until(lambda: self.conductor.hellos)
        self.conductor.say(Owners(1, self.owner.address, True))
        self.conductor.say(Open(DECODE, "m/decoder", "decode", 0, 256))

    def run(self, row: int, prompt: list[int], max_steps: int) -> None:
        BASES[row, 1] = 0
        data = columns.to_bytes(columns.u32(prompt))
        wanted = Row(
            row, 1, row, 1, 0, [[row, len(prompt)], [DECODE, 0]], [0], [], {"tokens": data}, {},
            max_steps,
        )  # fmt: skip
        self.conductor.say(Run(row, "m/decoder", "prefill", 0, [wanted]))

    def wait(self, bound: float = BOUND_S) -> int:
        assert self.process is not None
        return self.process.wait(bound)

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.communicate()
        for fd in (self.read_end, self.write_end):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.network.close()


@pytest.fixture
def daemon(tmp_path: Path):
    made: list[Daemon] = []

    def make(**config: object) -> Daemon:
        made.append(Daemon(tmp_path, **config))
        return made[-1]

    yield make
    for d in made:
        d.close()


def test_it_serves_and_exits_when_told(daemon) -> None:
    d = daemon()
    p = d.start()
    d.greet()
    hello = d.conductor.hellos[0]
    assert (hello.role, hello.name, hello.life) == ("worker", "w0", LIFE)
    assert hello.capacity == {"pid": p.pid, "device": "cpu", "threads": 1}
    for i in (1, 2, 3):
        d.run(i, [40, 40 + i], 30 + i)
    d.until(lambda: d.conductor.ended(1, 2, 3))
    d.until(lambda: all(Kind.SETTLED in d.conductor.kinds(i) for i in (1, 2, 3)))
    for i in (1, 2, 3):
        assert d.owner.tokens(i) == reference_tokens([40, 40 + i], 30 + i)
        assert d.conductor.end(i)[0] is Kind.FINISHED
    d.conductor.say(Exit(0))
    assert d.wait() == exit_status.OK
    d.listen()
    assert d.conductor.counts["Bye"] == 1
    said = d.process.stderr.read()
    assert 'podium-progress {"worker": "w0", "phase": "warmup"' in said
    assert "serving ['m'] on cpu, 1 threads" in said


def test_it_ends_when_the_death_pipe_closes(daemon) -> None:
    d = daemon()
    d.start()
    d.greet()
    d.run(1, [40], 900)
    d.until(lambda: len(d.owner.tokens(1)) > 3)
    os.close(d.write_end)
    assert d.wait(2.0) == exit_status.OK
    d.write_end = os.dup(d.read_end)


def test_it_does_not_outlive_a_parent_that_is_killed(daemon, tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG: even while it loads, long before anybody polls the death pipe."""
    d = daemon()
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            "import subprocess, sys, time\n"
            f"p = subprocess.Popen({d.command()!r}, pass_fds=({d.read_end},))\n"
            "print(p.pid, flush=True)\n"
            "time.sleep(600)",
        ],
        cwd=ROOT, pass_fds=(d.read_end,), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    limit = time.monotonic() + BOUND_S
    while not d.conductor.hellos and time.monotonic() < limit:
        select.select([d.conductor.channel], [], [], 0.05)
        d.conductor.listen()
    assert d.conductor.hellos
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([child], [], [], 2.0)[0], "the worker outlived its parent"
    os.close(child)


def test_a_parent_that_is_gone_already_is_noticed_at_once(daemon) -> None:
    d = daemon()
    os.close(d.write_end)
    p = d.start()
    assert d.wait() == exit_status.OK
    assert "ended while this one started" in p.stderr.read()
    d.write_end = os.dup(d.read_end)
    assert d.conductor.hellos == []


def test_sigint_is_the_conductors_and_sigterm_drains(daemon) -> None:
    d = daemon()
    p = d.start()
    d.greet()
    d.run(1, [40], 400)
    d.until(lambda: len(d.owner.tokens(1)) > 3)
    p.send_signal(signal.SIGINT)
    p.send_signal(signal.SIGTERM)
    d.until(lambda: d.conductor.counts["Leaving"] == 1)
    leaving = next(m for m in d.conductor.received if isinstance(m, Leaving))
    assert leaving.grace_ms == 30_000
    d.until(lambda: d.conductor.ended(1))
    assert d.owner.tokens(1) == reference_tokens([40], 400)
    d.conductor.say(Exit(1000))
    assert d.wait() == exit_status.OK


def test_a_configuration_that_cannot_work_exits_78_with_one_clear_line(daemon) -> None:
    d = daemon(models={"m": {"kind": "refrence"}})
    p = d.start()
    assert d.wait() == exit_status.CONFIG
    said = [line for line in p.stderr.read().splitlines() if not line.startswith("podium-progress")]
    assert len(said) == 1
    assert "did you mean 'reference'?" in said[0]


def test_usage() -> None:
    p = subprocess.run(
        [sys.executable, "-m", "worker", "--name", "w0"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert p.returncode == exit_status.USAGE
    assert "--config" in p.stderr


def test_a_crash_inside_a_step_ends_the_process_with_a_status_of_its_own(daemon) -> None:
    faults = [{"point": "forward", "action": "exit", "when_token": 200, "at": 2}]
    d = daemon(models={"m": {"kind": "reference", "pages": 64, "options": {"faults": faults}}})
    d.start()
    d.greet()
    d.run(1, [40, 200], 30)
    assert d.wait() == 70


def test_beats_go_on_while_a_step_hangs(daemon) -> None:
    """The conductor tells a hang from silence by the age of the step."""
    faults = [{"point": "forward", "action": "hang", "when_token": 200, "at": 2}]
    d = daemon(models={"m": {"kind": "reference", "pages": 64, "options": {"faults": faults}}})
    d.start()
    d.greet()
    d.run(1, [40, 200], 30)
    d.until(lambda: d.conductor.last_beat.step_age_ms >= 500)
    assert isinstance(d.conductor.last_beat, Beat)
    assert isinstance(d.conductor.hellos[0], Hello)
    os.close(d.write_end)  # and it still ends with its parent
    assert d.wait(2.5) == exit_status.OK
    d.write_end = os.dup(d.read_end)

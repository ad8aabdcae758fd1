"""Runs one scenario on a running daemon: clients, strikes, scrapes; then judges what was seen."""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from protocol.channel.zeromq import ZmqNetwork
from protocol.client.stats import StatsReader
from protocol.errors import BadMessage, Unavailable
from tests.chaos import legality, scenario
from tests.chaos.client import Client, asks_to_json, from_line
from tests.chaos.history import End, Event, Frame, Tokens, check
from tests.chaos.http_client import ask_over_http
from tests.chaos.leaks import Baseline, wait_at_rest
from tests.chaos.legality import Facts
from tests.chaos.scenario import STEP_POINTS, Ask, Scenario, Strike
from tests.support.processes import ROOT, Daemon

STREAMS_S = 120.0  # for all streams of a seed to end
STALL_S = 3.0  # a strike comes this long after the last one even if nobody makes progress
SCRAPE_S = 0.05
GATEWAY_ENDS = ("exit", "segv", "kill")


@dataclass(slots=True)
class Outcome:
    """What came of one seed. `story`: what was done, with pids. `violations`: what must not be."""

    seed: int
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    attempts: int = 1
    ends: dict[str, int] = field(default_factory=dict[str, int])
    losses: int = 0
    scrapes: int = 0
    pids: list[int] = field(default_factory=list[int])
    story: list[str] = field(default_factory=list[str])
    violations: list[str] = field(default_factory=list[str])


class Run:
    """One seed on one daemon. `orders`: the folder that arms faults."""

    def __init__(self, daemon: Daemon, orders: Path, scene: Scenario) -> None:
        self.daemon = daemon
        self.orders = orders
        self.scene = scene
        self.outcome = Outcome(scene.seed, requests=len(scene.asks))
        self.facts = Facts()
        self.events: list[Event] = []
        self._count = 0
        self._more = asyncio.Event()
        self._clients = {n: Client(daemon.endpoints, n, self._emit) for n in ("a", "b")}
        self._process: asyncio.subprocess.Process | None = None
        self._planted: list[tuple[Path, Strike]] = []
        self._paused: set[int] = set()
        self._log_from = daemon.log_size()

    async def run(self, baseline: Baseline | None) -> Outcome:
        began = time.monotonic()
        self._bugs = self.daemon.snapshot()["bugs"]
        scraper = asyncio.create_task(self._scrape())
        try:
            await self._play()
        finally:
            scraper.cancel()
            with suppress(asyncio.CancelledError):
                await scraper
            await self._end_clients()
        left = await asyncio.to_thread(wait_at_rest, self.daemon, baseline)
        self.outcome.violations += [f"at rest: {x}" for x in left]
        self._judge()
        self.outcome.seconds = round(time.monotonic() - began, 2)
        return self.outcome

    # ---- the play

    async def _play(self) -> None:
        for client in self._clients.values():
            await client.connect()
        jobs = [
            asyncio.create_task(c.run(self.scene.of(n)), name=f"client {n}")
            for n, c in self._clients.items()
        ]
        if asks := self.scene.of("p"):
            jobs.append(asyncio.create_task(self._run_process(asks), name="client p"))
        if asks := self.scene.of("h"):
            jobs.append(asyncio.create_task(self._run_http(asks), name="client h"))
        striking = asyncio.create_task(self._strike_all(jobs))
        done, late = await asyncio.wait(jobs, timeout=STREAMS_S)
        striking.cancel()
        with suppress(asyncio.CancelledError):
            await striking
        self._let_go()
        for job in late:
            self.outcome.violations.append(f"{job.get_name()}: not over after {STREAMS_S:g} s")
            job.cancel()
        for job in done:
            if (error := job.exception()) is not None:
                self.outcome.violations.append(f"{job.get_name()}: {error!r}")

    async def _run_process(self, asks: list[Ask]) -> None:
        self._process = p = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.chaos.client", str(self.daemon.root), "p",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT, limit=1 << 24,
        )  # fmt: skip
        assert p.stdin is not None
        assert p.stdout is not None
        p.stdin.write(asks_to_json(asks).encode() + b"\n")
        async for line in p.stdout:
            if line.endswith(b"\n") and line != b'["ready"]\n':
                self._emit(from_line(line.decode()))
        status = await p.wait()
        if status and "p" not in self.facts.vanished:
            self.outcome.violations.append(f"the client process ended with {status}")

    async def _run_http(self, asks: list[Ask]) -> None:
        async with httpx.AsyncClient(timeout=STREAMS_S) as http:
            await asyncio.gather(
                *(ask_over_http(http, lambda: self.daemon.url, a, self._emit) for a in asks)
            )

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Tokens):
            self._count += len(event.tokens)
            self._more.set()

    async def _end_clients(self) -> None:
        for client in self._clients.values():
            client.close()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    # ---- strikes

    async def _strike_all(self, jobs: list["asyncio.Task[None]"]) -> None:
        total = sum(min(a.max_tokens, a.cancel_at or a.max_tokens) for a in self.scene.asks)
        for strike in self.scene.strikes:
            until = time.monotonic() + STALL_S
            while self._count < strike.at * total and (left := until - time.monotonic()) > 0:
                self._more.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._more.wait(), left)
            self._tell(f"{await self._strike(strike)}, after {self._count} of {total} tokens")

    async def _strike(self, s: Strike) -> str:
        if s.what == "plant":
            return self._plant(s)
        if s.what == "close":
            self.facts.closed.add(s.target)
            self._clients[s.target].close_early()
            return str(s)
        if s.target == "p":
            pid = self._process.pid if self._process and self._process.returncode is None else 0
        else:
            child = await asyncio.to_thread(self.daemon.child, s.target)
            pid = child["pid"] if child["state"] == "ready" else 0
        if not pid:
            return f"{s}: not there"
        self._note_strike(s)
        number = signal.SIGSTOP if s.what == "pause" else signal.Signals[s.what]
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        self.outcome.pids.append(pid)
        if s.what == "pause":
            self._paused.add(pid)
            asyncio.get_running_loop().call_later(s.ms / 1000, self._go_on, pid)
        return f"{s}, pid {pid}"

    def _note_strike(self, s: Strike) -> None:
        if s.target == "p":
            (self.facts.vanished if s.what == "SIGKILL" else self.facts.stalled).add("p")
        elif s.target == "gateway":
            self.facts.gateway_ended = True
        elif s.what == "SIGTERM":
            self.facts.left += 1

    def _go_on(self, pid: int) -> None:
        if pid in self._paused:
            self._paused.remove(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _plant(self, s: Strike) -> str:
        path = scenario.order_file(self.orders, s.point, s.action, s.target)
        path.touch()
        self._planted.append((path, s))
        return str(s)

    def _let_go(self) -> None:
        """Nothing strikes any more: orders nobody came past are taken back."""
        for pid in list(self._paused):
            self._go_on(pid)
        for path, s in self._planted:
            try:
                path.unlink()
            except FileNotFoundError:
                self._fired(s)
        self._planted.clear()

    def _fired(self, s: Strike) -> None:
        self._tell(f"fired: {s.point} {s.action} in {s.target}")
        f = self.facts
        if s.target == "gateway":
            f.gateway_ended = f.gateway_ended or s.action in GATEWAY_ENDS
            f.gateway_raised = f.gateway_raised or s.action in ("raise", "memory")
        elif s.target == "conductor":
            self._bugs += s.action == "raise"
        elif s.action in ("raise", "memory") and s.point in STEP_POINTS:
            f.failed_steps += 1
        elif s.action != "slow":
            f.crashes += s.action != "kill"

    # ---- watching

    async def _scrape(self) -> None:
        """P22, at every scrape: submitted = closed by reason + open."""
        network = ZmqNetwork()
        reader = StatsReader(self.daemon.endpoints, network)
        try:
            while True:
                with suppress(Unavailable, BadMessage):
                    r = (await reader.snapshot(10.0))["machine"]["requests"]
                    self.outcome.scrapes += 1
                    if r["submitted"] != sum(r["closed"].values()) + r["open"]:
                        self.outcome.violations.append(f"the count does not add up: {r}")
                await asyncio.sleep(SCRAPE_S)
        finally:
            reader.close()
            network.close()

    def _tell(self, line: str) -> None:
        self.outcome.story.append(line)

    # ---- judging

    def _judge(self) -> None:
        o, f = self.outcome, self.facts
        worker_strikes = f.left + f.crashes
        for s in self.scene.strikes:
            worker_strikes += s.target in scenario.WORKERS
        poisoned = any(a.poison == scenario.SEGV for a in self.scene.asks)
        for line in self.daemon.log_lines(self._log_from):
            event = line.get("event", "")
            if event == "worker lost":
                f.losses.append(bool(line["charged"]))
                self._tell(f"lost {line['worker']}: {line['why']}, charged: {line['charged']}")
                if not worker_strikes and not poisoned:
                    o.violations.append(f"{line['worker']} was lost and nothing struck it")
            elif "internal error" in event and not f.crashes:
                o.violations.append(f"{line.get('child')}: {event}")
        bugs = self.daemon.snapshot()["bugs"]
        if bugs != self._bugs:
            o.violations.append(f"{bugs} bugs in the conductor, {self._bugs} planted")
        o.losses = len(f.losses)
        found = check(legality.expectations(self.scene.asks, f), self.events)
        o.violations += [f"{v.key}: {v.text}" for v in found]
        o.tokens = self._count
        for event in self.events:
            if isinstance(event, End):
                o.ends[event.reason] = o.ends.get(event.reason, 0) + 1
            elif isinstance(event, Frame):
                o.attempts = max(o.attempts, event.attempt)

"""The leak oracle: at rest, a daemon is what it was before."""

import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from conductor.core.batching import IDLE_STANDING
from conductor.gateway.gateway import THREADS as TOKENIZER_THREADS
from tests.support.processes import Daemon

REST_S = 40.0
POLL_S = 0.1
SETTLE_S = 2.0  # the conductor closes its side of our own looks at it a moment after we do


@dataclass(slots=True)
class Baseline:
    """The most descriptors and threads that each kind of process had at rest, before any chaos."""

    fds: dict[str, int] = field(default_factory=dict[str, int])
    threads: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, daemon: Daemon) -> "Baseline":
        found = cls()
        for name, p in _processes(daemon).items():
            kind = _kind(name)
            found.fds[kind] = max(found.fds.get(kind, 0), p.num_fds())
            found.threads[kind] = max(found.threads.get(kind, 0), p.num_threads())
        return found


def wait_at_rest(daemon: Daemon, baseline: Baseline | None, timeout_s: float = REST_S) -> list[str]:
    """What is still not at rest after that time; empty is good."""
    end = time.monotonic() + timeout_s
    while True:
        left = leftovers(daemon, baseline)
        if not left or time.monotonic() > end:
            return left
        time.sleep(POLL_S)


def leftovers(daemon: Daemon, baseline: Baseline | None) -> list[str]:
    """Everything that an idle daemon does not have."""
    snapshot = daemon.snapshot()
    machine = snapshot["machine"]
    left = [f"{c['name']} is {c['state']}" for c in snapshot["children"] if c["state"] != "ready"]
    requests = machine["requests"]
    left += _nonzero("requests", requests, ("open", "queued", "queued_tokens", "active"))
    owners = [f"{o['role']} {o['name']}" for o in machine["owners"] if o["role"] != "gateway"]
    left += [f"owner {o} is still known" for o in owners]
    if len(machine["workers"]) != sum(c["role"] == "worker" for c in snapshot["children"]):
        left.append(f"workers: {[w['name'] for w in machine['workers']]}")
    for worker in machine["workers"]:
        left += _worker(worker)
    if left:
        return left  # processes are looked at when they have nothing to do
    return _of_processes(daemon, baseline) + _sockets(daemon, machine["owners"])


def _worker(worker: Any) -> list[str]:
    name, load = worker["name"], worker["load"]
    if not load:
        return [f"{name} has not told its load yet"]
    left = _nonzero(name, worker, ("rows", "committed_pages"))
    fields = ("rows", "held", "one_shot", "in_flight", "pages_used")
    left += _nonzero(f"{name} itself", load, (*fields, "unacknowledged_bytes"))
    if not worker["batches"] == load["standing"] <= IDLE_STANDING:
        left.append(f"{name}: {worker['batches']} batches, {load['standing']} by its own account")
    if load["pages_free"] + load["pages_used"] != load["pages_total"]:
        left.append(f"{name}: pages do not add up: {load}")
    return left


def _nonzero(what: str, values: Any, names: tuple[str, ...]) -> list[str]:
    return [f"{what}: {n} is {values[n]}" for n in names if values[n]]


def _of_processes(daemon: Daemon, baseline: Baseline | None) -> list[str]:
    processes = _processes(daemon)
    left: list[str] = []
    end = time.monotonic() + SETTLE_S
    while baseline is not None:
        left = [line for n, p in processes.items() for line in _grown(n, p, baseline)]
        if not left or time.monotonic() > end:
            break
        time.sleep(POLL_S)
    found = {p.pid for p in psutil.Process(daemon.process.pid).children(recursive=True)}
    strangers = found - {p.pid for p in processes.values()}
    return left + [f"process {pid} is nobody's" for pid in strangers]


def _grown(name: str, p: psutil.Process, baseline: Baseline) -> list[str]:
    kind = _kind(name)
    fds, threads = p.num_fds(), p.num_threads()
    most = baseline.threads[kind] + (TOKENIZER_THREADS - 1 if kind == "gateway" else 0)
    left: list[str] = []
    if fds > baseline.fds[kind]:
        left.append(f"{name} has {fds} descriptors, {baseline.fds[kind]} before")
    if threads > most:
        left.append(f"{name} has {threads} threads, at most {most} are its own")
    return left


def _sockets(daemon: Daemon, owners: Any) -> list[str]:
    known = {"control.sock", "stats.sock", *(f"s{o['life']:016x}.sock" for o in owners)}
    found = {p.name for p in daemon.root.glob("*.sock")}
    return [f"socket {name} is nobody's" for name in sorted(found - known)]


def _processes(daemon: Daemon) -> dict[str, psutil.Process]:
    children = {c["name"]: psutil.Process(c["pid"]) for c in daemon.snapshot()["children"]}
    return {"conductor": psutil.Process(daemon.process.pid), **children}


def _kind(name: str) -> str:
    return name if name in ("conductor", "gateway") else "worker"

"""What the benchmark `conductor` puts under load, in its own process: the conductor, or an echo.

Both poll one ROUTER and drain it. CPU is this process's, ZeroMQ's I/O thread included; the load is
another process (conductor_load.py).
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog
import uvloop
import zmq

from conductor.core.commands import Command, Forget, Send
from conductor.core.events import Event, Received, Tick
from conductor.core.machine import Machine
from conductor.shell.core_loop import CoreLoop
from conductor.shell.links import Links
from protocol import PROTOCOL_VERSION, columns
from protocol.channel.zeromq import ZmqNetwork
from protocol.config import DaemonConfig, parse
from protocol.messages import Hello, Submit
from scripts.bench import record
from scripts.bench.conductor_load import MODEL, Load

OWNER = 7
SETUP_S = 180.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One window: CPU and wall seconds of this process, and the messages that came."""

    cpu: float
    messages: int
    wall: float

    @property
    def us(self) -> float:
        """CPU of a message."""
        return 1e6 * self.cpu / self.messages


class Generator:
    """The other process. `go` starts a window; what it says arrives line by line on `stdout`."""

    def __init__(self, load: Load) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.conductor_load", json.dumps(asdict(load))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=record.ROOT,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self.stdout = self._process.stdin, self._process.stdout

    def go(self) -> None:
        self._stdin.write("go\n")
        self._stdin.flush()

    def line(self) -> str:
        """Its next word; raises if it ended."""
        line = self.stdout.readline()
        if not line:
            raise RuntimeError(f"the load ended with status {self._process.wait()}")
        return line

    def close(self) -> None:
        self._stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.stdout.close()


class Echo:
    """A raw poll-and-drain echo: every frame goes back as it came, by the same calls that the
    conductor's channel makes."""

    def __init__(self, load: Load) -> None:
        self._network = ZmqNetwork()
        self._channel = self._network.bind(load.address)
        self._generator = Generator(load)
        self._poller = zmq.Poller()
        self._poller.register(self._channel.pollable, zmq.POLLIN)
        self._poller.register(self._generator.stdout.fileno(), zmq.POLLIN)
        line = self._generator.line()
        assert line == "ready\n", line

    def window(self) -> Measured:
        cpu, wall = time.process_time(), time.perf_counter()
        self._generator.go()
        self._until_done()
        spent = time.process_time() - cpu
        messages = int(self._generator.line().split()[1])
        return Measured(spent, messages, time.perf_counter() - wall)

    def _until_done(self) -> None:
        channel = self._channel
        while True:
            for source, _ in self._poller.poll():
                if source is not channel.pollable:
                    return
            while frames := channel.receive():
                for peer, frame in frames:
                    channel.send(frame, peer)

    def close(self) -> None:
        self._generator.close()
        self._network.close()


class Conductor:
    """`Machine` and `Links` under `CoreLoop` and uvloop, wired as the daemon wires them; without
    children, logs and statistics. One owner, fed directly, has all requests."""

    def __init__(self, config: DaemonConfig, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._network = ZmqNetwork()
        channel = self._network.bind(address)
        self.machine = Machine(config, 0xC0, seed=1)
        self.links = Links(channel, self._deliver)
        self.commands = 0
        self._came = asyncio.Event()
        self.core = CoreLoop(
            self.machine,
            config.supervision.beat_ms / 1000,
            structlog.get_logger(),
            perform=self._perform,
            reset=self.links.reset,
            turned=self._receive_again,
            ticked=self._ticked,
            broken=self._broken,
        )
        self._soon = False
        self._fileno = channel.fileno()
        self._loop.add_reader(self._fileno, self._receive)
        self.core.feed(Tick())
        hello = Hello("client", "owner", OWNER, [PROTOCOL_VERSION], "ipc://nowhere")
        self.core.feed(Received(OWNER, hello))

    def _deliver(self, event: Event) -> None:
        self.core.feed(event)
        if isinstance(event, Received) and isinstance(event.message, Hello):
            self._came.set()

    def _perform(self, command: Command) -> None:
        self.commands += 1
        if isinstance(command, Send):
            self.links.send(command.life, command.message)
        elif isinstance(command, Forget):
            self.links.forget(command.life)

    def _receive(self) -> None:
        self._soon = False
        if self.links.receive():
            self._receive_again()

    def _receive_again(self) -> None:
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self._receive)

    def _ticked(self) -> None:
        if self.links.receive():
            self._receive_again()

    def _broken(self, cause: str) -> None:
        raise RuntimeError(cause)

    def submit(self, streams: range) -> None:
        for stream in streams:
            inputs = {"tokens": columns.to_bytes(columns.u32([1]))}
            message = Submit(stream, 1, MODEL, inputs, {"max_tokens": 1000, "seed": 1})
            self.core.feed(Received(OWNER, message))

    async def line(self, generator: Generator) -> str:
        """The generator's next word, while the loop serves."""
        came = self._loop.create_future()
        fileno = generator.stdout.fileno()
        self._loop.add_reader(fileno, lambda: came.done() or came.set_result(None))
        try:
            await asyncio.wait_for(came, SETUP_S)
        finally:
            self._loop.remove_reader(fileno)
        return generator.line()

    async def settle(self, load: Load, generator: Generator, idle: int) -> None:
        """All workers are there, every one has its rows, and `idle` requests wait beside."""
        while len(self.machine.snapshot(0.0)["workers"]) < load.workers:
            self._came.clear()
            await self._came.wait()
        self.submit(range(load.workers * load.rows))
        line = await self.line(generator)
        assert line == "ready\n", line
        self.submit(range(1 << 32, (1 << 32) + idle))
        requests = self.core.snapshot()["requests"]
        assert requests["active"] == load.workers * load.rows, requests
        assert requests["queued"] == idle, requests

    async def window(self, generator: Generator) -> Measured:
        cpu, wall = time.process_time(), time.perf_counter()
        generator.go()
        line = await self.line(generator)
        spent = time.process_time() - cpu
        return Measured(spent, int(line.split()[1]), time.perf_counter() - wall)

    def close(self) -> None:
        self._loop.remove_reader(self._fileno)
        self.core.stop()
        self._network.close()


def config(rows: int, idle: int) -> DaemonConfig:
    """Nobody is silent for long enough to be lost: the owner is not there at all."""
    return parse(
        {
            "models": {MODEL: {"kind": "reference"}},
            "limits": {"max_rows": rows, "max_queued": idle + (1 << 20)},
            "supervision": {"silence_ms": 3_600_000},
        }
    )


@dataclass(slots=True)
class Run:
    """Windows of the conductor and, each right after, of the echo; counts over all windows:
    messages received and dropped, commands given, requests open."""

    conductor: list[Measured]
    echo: list[Measured]
    counts: dict[str, int]


def run(load: Load, windows: int, idle: int = 0) -> Run:
    """`idle`: requests that are registered beside and wait for a place."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(load, windows, idle))


async def _run(load: Load, windows: int, idle: int) -> Run:
    server = Conductor(config(load.rows, idle), load.address)
    generator = Generator(load)
    echo = Echo(replace(load, echo=True, address=f"{load.address}-echo"))
    found = Run([], [], {})
    try:
        await server.settle(load, generator, idle)
        before, commands = server.links.statistics(), server.commands
        for _ in range(windows):
            found.conductor.append(await server.window(generator))
            found.echo.append(echo.window())  # the conductor does not run meanwhile
        after = server.links.statistics()
        assert server.core.bugs == 0
        found.counts = {
            "received": after["received"] - before["received"],
            "sent": after["sent"] - before["sent"],
            "commands": server.commands - commands,
            "dropped": sum(after["dropped"].values()),
            "open": server.core.snapshot()["requests"]["open"],
        }
        return found
    finally:
        generator.close()
        server.close()
        echo.close()


def address(folder: Path) -> str:
    return f"ipc://{folder}/control.sock"

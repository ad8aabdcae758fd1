"""The daemon: wires the core, the sockets and the children, and takes them through their phases.

starting -> ready -> draining -> stopping. A first SIGTERM or SIGINT drains: admission stops,
running streams finish within `supervision.drain_s`, then workers are told to exit. A second one
ends every child at once. When supervision gives up, open requests end naming the cause, and so does
the daemon.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conductor.core.events import Drain, Event, Fatal, Received, Tick, WorkerExited
from conductor.core.machine import Machine
from conductor.observe.collector import Collector, Sources
from conductor.observe.stats_socket import StatsSocket
from conductor.shell import command_lines, exit_codes
from conductor.shell.console import Console
from conductor.shell.core_loop import CoreLoop
from conductor.shell.deaths import Death
from conductor.shell.execute import Executor
from conductor.shell.links import Links
from conductor.shell.runtime_dir import RuntimeDir
from conductor.shell.service_manager import ServiceManager
from conductor.shell.supervisor import ChildSpec, Role, Supervisor
from protocol import __version__
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.config import DaemonConfig
from protocol.ids import new_life
from protocol.messages import Bye, Exit
from protocol.stats import ConductorStats, Phase

CHILD_GRACE_S = 5.0  # from "leave" to SIGKILL, once nothing is open
CLOSING_S = 2.0  # over the drain time, for the core to say that it is over
LAST_WORDS_MS = 500  # for owners to hear why the daemon ends
URL_POLL_S = 0.02
LOADING_S = 15.0  # asked of the service manager at every beat of a start


@dataclass(frozen=True, slots=True)
class Ending:
    cause: str
    code: int


class Daemon:
    """One `podium serve`. `config` is resolved; `specs` are the children to run, by default those
    that the configuration names."""

    def __init__(
        self,
        config: DaemonConfig,
        environment: Mapping[str, str],
        console: Console,
        service: ServiceManager,
        specs: list[ChildSpec] | None = None,
    ) -> None:
        assert config.runtime_dir is not None
        assert config.workers != "auto"
        self._root = Path(config.runtime_dir)
        self._config = config
        self._environment = command_lines.child_environment(environment)
        self._console = console
        self._log = console.log
        self._service = service
        self._specs = specs
        self._life = new_life()
        self._started = time.monotonic()
        self._phase: Phase = "starting"
        self._gateway_url = ""
        self._url_timer: asyncio.TimerHandle | None = None
        self._receive_soon = False
        self._late_failure = exit_codes.OK  # supervision gave up while draining

    async def run(self) -> int:
        """Serve until told to stop. Returns the exit status; raises `AlreadyRunning` or
        `ConfigError` before anything was started."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self._abort: asyncio.Future[signal.Signals] = loop.create_future()
        self._drained = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        with ExitStack() as held:
            directory = RuntimeDir.acquire(self._root)
            held.callback(directory.release)
            self._open(directory.endpoints, held)
            return await self._serve()

    # ---- wiring

    def _open(self, endpoints: Endpoints, held: ExitStack) -> None:
        config = self._config
        self._endpoints = endpoints
        text = config.model_dump_json(indent=1)
        endpoints.config.touch(mode=0o600)
        endpoints.config.write_text(text, encoding="utf-8")
        specs = self._specs or command_lines.child_specs(config, endpoints)
        network = ZmqNetwork()
        held.callback(network.close)
        control, stats = network.bind(endpoints.control), network.bind(endpoints.stats)
        machine = Machine(config, self._life)
        self._supervisor = Supervisor(specs, config.supervision, self._environment, self)
        held.callback(self._supervisor.close)
        held.callback(self._supervisor.kill_all, "the daemon ends")
        self._links = Links(control, self._deliver)
        executor = Executor(
            self._links,
            self._supervisor,
            self._log,
            welcomed=self._welcomed,
            owner_lost=self._remove_socket,
            drained=self._drained.set,
        )
        self._core = CoreLoop(
            machine,
            config.supervision.beat_ms / 1000,
            self._log,
            perform=executor.perform,
            reset=self._links.reset,
            turned=self._receive_again,
            ticked=self._ticked,
            broken=lambda cause: self.gave_up(cause, exit_codes.BUG),
        )
        held.callback(self._core.stop)
        self._loop.set_exception_handler(self._callback_failed)
        held.callback(self._loop.set_exception_handler, None)
        self._stats = StatsSocket(stats, self._collector().snapshot)
        for channel, receive in ((control, self._receive), (stats, self._serve_stats)):
            self._loop.add_reader(channel.fileno(), receive)
            held.callback(self._loop.remove_reader, channel.fileno())

    def _collector(self) -> Collector:
        return Collector(
            Sources(
                conductor=self._conductor,
                machine=self._core.snapshot,
                children=self._supervisor.statistics,
                gateway_url=lambda: self._gateway_url,
                links=self._links.statistics,
                ticks=self._core.turns.statistics,
                bugs=lambda: self._core.bugs,
                log=self._console.statistics,
            )
        )

    def _conductor(self) -> ConductorStats:
        return {
            "name": self._config.name,
            "life": self._life,
            "pid": os.getpid(),
            "version": __version__,
            "phase": self._phase,
            "uptime_s": round(time.monotonic() - self._started, 3),
        }

    # ---- sockets

    def _deliver(self, event: Event) -> None:
        self._core.feed(event)

    def _receive(self) -> None:
        self._receive_soon = False
        if self._links.receive():
            self._receive_again()

    def _receive_again(self) -> None:
        """A send may have eaten the edge that would have told of a frame: look again soon."""
        if not self._receive_soon:
            self._receive_soon = True
            self._loop.call_soon(self._receive)

    def _serve_stats(self) -> None:
        if self._stats.receive():
            self._loop.call_soon(self._serve_stats)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        what = str(context.get("message", "a callback failed"))
        if isinstance(error, Exception):
            self._core.failed(what, error)
        else:
            self._log.error(f"event loop: {what}")

    # ---- phases

    async def _serve(self) -> int:
        self._announce()
        try:
            self._supervisor.start()
        except OSError as e:
            self.gave_up(f"a child cannot be started: {e}", exit_codes.GAVE_UP)
        self._core.feed(Tick())
        leaving = asyncio.ensure_future(self._leave(await self._ending))
        await asyncio.wait({leaving, self._abort}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            return leaving.result()
        leaving.cancel()
        number = self._abort.result()
        self._log.warning(f"{number.name} again: stopping at once")
        self._supervisor.kill_all("the daemon was told twice to stop")
        with suppress(TimeoutError):
            await self._supervisor.reap()
        return exit_codes.SIGNALLED + number

    async def _leave(self, ending: Ending) -> int:
        self._phase = "draining"
        self._console.end_progress()
        self._service.stopping(ending.cause.partition("\n")[0])
        code = ending.code
        if code == exit_codes.OK:
            drain_s = self._config.supervision.drain_s
            self._log.info(f"{ending.cause}: draining for at most {drain_s} s")
            self._core.feed(Drain(drain_s * 1000))
            patience = drain_s + CLOSING_S
        else:
            self._log.error(f"giving up: {ending.cause}")
            self._core.feed(Fatal(ending.cause.partition("\n")[0]))
            self._core.feed(Drain(LAST_WORDS_MS))
            patience = LAST_WORDS_MS / 1000 + CLOSING_S
        with suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), patience)
        self._phase = "stopping"
        await self._supervisor.stop(self._ask_to_leave, CHILD_GRACE_S)
        code = code or self._late_failure
        self._log.info(f"stopped, exit status {code}")
        return code

    def _ask_to_leave(self, role: Role, life: int) -> bool:
        return role == "worker" and self._links.send(life, Exit(int(CHILD_GRACE_S * 1000)))

    def _signalled(self, number: signal.Signals) -> None:
        if not self._ending.done():
            self._ending.set_result(Ending(number.name, exit_codes.OK))
        elif not self._abort.done():
            self._abort.set_result(number)

    def _ticked(self) -> None:
        self._service.alive()
        if self._phase == "starting":
            self._service.loading(LOADING_S)
        if self._links.receive():
            self._receive_again()

    # ---- getting ready

    def _announce(self) -> None:
        config = self._config
        self._service.loading(LOADING_S)
        self._log.info(f"podium {__version__} starts", pid=os.getpid(), runtime_dir=str(self._root))
        for w in config.workers if config.workers != "auto" else ():
            models = list(w.models if w.models is not None else config.models)
            self._log.info(
                f"worker {w.name} will serve {', '.join(models)}",
                device=w.device,
                threads=w.threads,
            )

    def _welcomed(self, life: int) -> None:
        if self._supervisor.role_of(life) == "gateway":
            self._await_url(life)
        else:
            self._child_ready(life)

    def _remove_socket(self, life: int) -> None:
        """An owner that was killed leaves its stream socket behind."""
        self._endpoints.stream_path(life).unlink(missing_ok=True)

    def _await_url(self, life: int) -> None:
        """The gateway writes its URL once it listens, before or after its Hello."""
        self._url_timer = None
        try:
            self._gateway_url = self._endpoints.gateway.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            self._gateway_url = ""
        if self._gateway_url:
            self._child_ready(life)
        elif self._supervisor.role_of(life) is not None:
            self._url_timer = self._loop.call_later(URL_POLL_S, self._await_url, life)

    def _child_ready(self, life: int) -> None:
        self._supervisor.mark_ready(life)
        if self._phase != "starting" or not self._supervisor.all_ready():
            return
        self._phase = "ready"
        self._console.end_progress()
        where = self._gateway_url or self._endpoints.control
        told = f"ready: {where}"
        self._service.ready(told)
        took = f"{time.monotonic() - self._started:.1f} s"
        self._log.info(told, models=", ".join(self._config.models), took=took)

    # ---- what the supervisor tells

    def child_started(self, name: str, role: Role, pid: int, restarts: int) -> None:
        if role == "gateway":
            if self._url_timer is not None:
                self._url_timer.cancel()
            self._endpoints.gateway.unlink(missing_ok=True)
            self._gateway_url = ""
        self._log.info(f"{name} starts", pid=pid, **({"restart": restarts} if restarts else {}))

    def child_line(self, name: str, line: str) -> None:
        self._console.child(name, line)

    def child_progress(self, name: str, progress: dict[str, Any]) -> None:
        self._service.loading(LOADING_S)
        self._console.progress(name, progress)

    def child_ended(self, name: str, role: Role, life: int, death: Death) -> None:
        self._console.end_progress(name)
        if self._phase == "stopping":
            self._log.debug(f"{name} ended", why=death.why)
            self._links.forget(life)
            return
        self._log.warning(f"{name} ended", why=death.why)
        while self._links.receive():  # what it said before it died counts
            pass
        if role == "worker":
            self._core.feed(WorkerExited(life, death.outside, death.why))
        else:  # the dead cannot say goodbye: its streams have no owner any more
            self._core.feed(Received(life, Bye(f"its process ended: {death.why}")))
        self._links.forget(life)

    def gave_up(self, cause: str, exit_code: int) -> None:
        if not self._ending.done():
            self._ending.set_result(Ending(cause, exit_code))
        elif self._phase != "stopping":
            self._log.error(f"while draining: {cause}")
            self._late_failure = exit_code
            self._drained.set()  # waiting longer helps nobody

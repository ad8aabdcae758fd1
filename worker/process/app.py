"""Wiring of the worker process: configuration → device, models, threads, link, loop."""

import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from protocol import faults
from protocol.channel.base import Network
from protocol.channel.zeromq import ZmqNetwork
from protocol.clock import SystemClock
from protocol.config import ON_CPU, DaemonConfig, WorkerConfig, parse
from protocol.errors import ConfigError
from protocol.graph import spec_to_wire
from protocol.messages import Hello
from worker.api.model import LoadedModel
from worker.engine.engine import Engine
from worker.engine.gpu_thread import GpuThread
from worker.engine.mailbox import Mailbox
from worker.engine.orders import Post
from worker.engine.postprocess_thread import PostprocessThread
from worker.engine.step_tail import ServedModel
from worker.micro_scheduler.scheduler import MicroScheduler
from worker.process import exit_status
from worker.process.link import ConductorLink, versions
from worker.process.loading import load_models, make_device, own_section, placed_models
from worker.process.log import Log, progress
from worker.process.loop import WorkerLoop
from worker.process.step_pace import StepPace

SWITCH_INTERVAL_S = 0.0005
"""At the default of 5 ms a busy Python thread can delay a launch by as much."""

CPU_HANG_S = 30.0
"""Other processes may take a CPU's cores from a step; nothing takes a GPU from it."""

STOP_S = 0.5  # for each thread, at the end: there is nothing left to save


def run(
    *,
    config_path: str,
    name: str,
    life: int,
    control: str,
    death_fd: int | None,
    log_level: str | None,
) -> int:
    """The whole life of a worker process. Returns its exit status."""
    log = Log(name, log_level or "info")
    try:
        config = _read(config_path)
        if log_level is None:
            log = Log(name, config.log.level)
        worker = Worker(config, own_section(config, name), life, log)
        worker.load()
        faults.install(config.faults, name)  # the warm-up's steps are nobody's
    except ConfigError as e:
        log.say("error", e.message)
        return exit_status.CONFIG
    except Exception as e:
        log.say("error", f"cannot start: {type(e).__name__}: {e}")
        if log_level == "debug":
            raise
        return exit_status.FAILED
    return worker.serve(control, death_fd)


def _read(path: str) -> DaemonConfig:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot read the configuration: {e}") from None
    return parse(data, path)


class Worker:
    """What one worker process is made of. `on_fatal` is called by a thread that cannot go on; the
    default ends the process."""

    def __init__(
        self,
        config: DaemonConfig,
        own: WorkerConfig,
        life: int,
        log: Log,
        *,
        engine: Engine | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.config = config
        self.own = own
        self.life = life
        self.log = log
        self.clock = SystemClock()
        self.engine = engine or Engine(make_device(own.device), clock=self.clock)
        self.device = self.engine.device
        self.loaded: dict[str, LoadedModel] = {}
        self.mailbox: Mailbox[Post] = Mailbox()
        self.threads = own.threads or _default_threads(config)
        self._on_fatal = on_fatal or self.die
        self._post: PostprocessThread | None = None
        self.gpu = GpuThread(
            self.engine, self._hand_over, self._on_fatal, self.clock, threads=self.threads
        )

    def load(self) -> None:
        """Load and warm up, on the GPU thread: its modes and its thread pool are its own."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.gpu.start()
        tell = functools.partial(progress, self.own.name)
        models = placed_models(self.config, self.own)
        self.loaded = self.gpu.call(lambda: load_models(self.engine, models, tell))
        torch.set_num_threads(1)  # from here on this thread computes nothing
        tell("warmup", device=self.device.name)
        self.gpu.call(self.engine.warmup)
        # What loading made lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()

    def serve(self, control: str, death_fd: int | None) -> int:
        network = ZmqNetwork()
        self.log.detach()
        loop = self.wire(network, control, death_fd)
        signal.signal(signal.SIGTERM, lambda _signal, _frame: loop.ask_to_leave())
        self.log.say(
            "info", f"serving {sorted(self.loaded)} on {self.device.name}, {self.threads} threads"
        )
        try:
            status = loop.run()
        except Exception as e:
            self.log.last_words(f"internal error: {type(e).__name__}: {e}")
            self.log.close()
            os._exit(exit_status.BUG)
        self.close(network, status)
        return status

    def wire(self, network: Network, control: str, death_fd: int | None) -> WorkerLoop:
        """Start the postprocess thread and build the main loop around it."""
        served = {
            n: ServedModel(m.graph, m.next_walk, tuple(m.eos)) for n, m in self.loaded.items()
        }
        post = self._post = PostprocessThread(
            engine=self.engine,
            device=self.device,
            network=network,
            worker_life=self.life,
            models=served,
            tell_main=self.mailbox.put,
            on_fatal=self._on_fatal,
            clock=self.clock,
        )
        post.start()
        self.scheduler = MicroScheduler(
            self.own.depth, {n: frozenset(m.eos) for n, m in self.loaded.items()}
        )
        channel = network.connect(control)
        self.link = ConductorLink(channel, self.clock, self._hello, self.scheduler.inventory)
        return WorkerLoop(
            channel=channel,
            link=self.link,
            scheduler=self.scheduler,
            gpu=self.gpu,
            post=post,
            mailbox=self.mailbox,
            figures=self._figures,
            clock=self.clock,
            pace=StepPace(self._hang_s()),
            log=self.log.say,
            death_fd=death_fd,
            grace_ms=self.config.supervision.drain_s * 1000,
        )

    @property
    def post(self) -> PostprocessThread:
        assert self._post is not None, "not wired yet"
        return self._post

    # ---- inside

    def _hang_s(self) -> float:
        if self.own.hang_ms is not None:
            return self.own.hang_ms / 1000
        on_cpu = self.device.torch_device.type == "cpu"
        return CPU_HANG_S if on_cpu else self.config.supervision.silence_ms / 1000

    def _hello(self, inventory: dict[str, Any]) -> Hello:
        return Hello(
            role="worker",
            name=self.own.name,
            life=self.life,
            versions=versions(),
            specs=[spec_to_wire(self.engine.model_spec(n)) for n in self.loaded],
            capacity={"pid": os.getpid(), "device": self.device.name, "threads": self.threads},
            inventory=inventory,
        )

    def _figures(self) -> dict[str, Any]:
        """Published figures; read while the threads work, so each is a snapshot of its own."""
        engine = self.engine.statistics()
        post = self.post.statistics()
        gpu = self.gpu.statistics()
        seconds = engine["step_seconds"]
        return {
            "pages_free": engine["pages_free"],
            "pages_used": engine["pages_used"],
            "pages_total": engine["pages_total"],
            "tokens_out": post["tokens_out"],
            "wasted": post["wasted"],
            "failed_steps": gpu["failed_steps"],
            "missing_events": gpu["missing_events"],
            "unacknowledged_bytes": post["unacknowledged_bytes"] + post["pending_bytes"],
            "stage_s": {k: v["sum"] for k, v in seconds.items() if k != "bounds"},
        }

    def _hand_over(self, batch: Any) -> None:
        self.post.order(batch)

    def die(self, error: BaseException) -> None:
        """Called by a thread that cannot go on. No cleanup: the device may hang in it."""
        lost = isinstance(error, Exception) and self.device.fatal(error)
        what = "the device is lost" if lost else "internal error"
        self.log.last_words(f"{what}: {type(error).__name__}: {error}")
        os._exit(exit_status.DEVICE if lost else exit_status.BUG)

    def close(self, network: Network, status: int) -> None:
        stopped = self.gpu.stop(STOP_S)
        stopped = self.post.stop(STOP_S) and stopped
        self.link.close()
        network.close()
        self.mailbox.close()
        if stopped:
            self.engine.shutdown()
        self.log.close()
        if not stopped:  # a step hangs; leaving is still what was asked for
            self.log.last_words("a thread did not stop in time")
            os._exit(status)


def _default_threads(config: DaemonConfig) -> int:
    """The machine's cores divided by the workers that compute on them."""
    sections = config.workers if config.workers != "auto" else ()
    on_cpu = sum(1 for w in sections if w.device in ON_CPU)
    return max(1, len(os.sched_getaffinity(0)) // max(1, on_cpu))

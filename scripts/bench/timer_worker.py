"""A real worker on a device that only takes time: engine, threads, loop, links are the product's.

A step keeps the device busy for a fixed time and computes nothing, so all that the host does shows:
as idle time between steps where it is late, as CPU where it is not. The conductor and the owner of
the streams are another process (timer_peer.py), because here they would take the interpreter.
"""

import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protocol.channel.zeromq import ZmqNetwork
from protocol.config import parse
from protocol.graph import GraphSpec, Loop, Step, Walk
from scripts.bench import record
from worker.api.inputs import (
    ModelInputsFromEngine,
    NodeInputs,
    ResourceStep,
    StepContext,
    SubmoduleStep,
)
from worker.api.model import DONE, LoadedModel, NodeResourceSpec
from worker.api.outputs import StepOutputs
from worker.api.submodule import NodeSubmodule
from worker.device.cpu import CpuDevice, CpuEvent
from worker.engine.engine import Engine
from worker.process.app import SWITCH_INTERVAL_S, Worker

LIFE, OWNER = 0xAA, 0xBB
NODE = "decoder"
BOUND_S = 120.0
WARM_STEPS = 30
THREADS = ("main", "gpu", "postprocess")


class TimerEvent(CpuEvent):
    """Done when the device has come to the end of what was launched before `record`."""

    def __init__(self, device: "TimerDevice") -> None:
        self._device, self._until = device, 0.0

    def record(self) -> None:
        self._until = self._device.busy_until

    def query(self) -> bool:
        return time.perf_counter() >= self._until

    def synchronize(self) -> None:
        while (left := self._until - time.perf_counter()) > 0:
            time.sleep(left)


class TimerDevice(CpuDevice):
    """One stream. A launch returns at once and keeps the device busy for `step_s` after what was
    launched before; `launches` are (rows, idle seconds before it)."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.busy_until = 0.0
        self.launches: list[tuple[int, float]] = []

    def launch(self, rows: int) -> None:
        now = time.perf_counter()
        self.launches.append((rows, max(0.0, now - self.busy_until)))
        self.busy_until = max(now, self.busy_until) + self.step_s

    def new_event(self) -> TimerEvent:
        return TimerEvent(self)


class TimerNode(NodeSubmodule):
    """Takes the device's time and says token 7 for every row; `kv`: grows a paged history too."""

    steady_walks = frozenset({"decode"})

    def __init__(self, device: TimerDevice, kv: bool) -> None:
        super().__init__()
        self._device, self._kv = device, kv
        self._sevens = torch.full((4096,), 7, dtype=torch.int64)

    def declare_step(self, ctx: StepContext) -> SubmoduleStep | None:
        if not self._kv:
            return None
        return SubmoduleStep({"kv": ResourceStep(ctx.segments("main"))})

    def preprocess(
        self, engine: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, torch.Tensor]:
        return {}

    def forward_batched(
        self, engine: ModelInputsFromEngine, **tensors: torch.Tensor
    ) -> StepOutputs:
        self._device.launch(len(engine.request_ids))
        rows = [i.request_id for i in engine.infos if i.samples]
        return StepOutputs(rows, {"tokens": self._sevens[: len(rows)]})


def model(device: TimerDevice, kv: bool = False, nodes: int = 1) -> LoadedModel:
    """`nodes`: how many the graph has; one of them is walked."""
    names = (NODE, *(f"extra{i}" for i in range(1, nodes)))
    history: Mapping[str, Any] = {
        "layers": 1, "kv_heads": 1, "head_dim": 1, "values": False, "dtype": torch.int64,
    }  # fmt: skip
    extra = tuple(Walk(f"walk_{n}", Step(n)) for n in names[1:])
    return LoadedModel(
        graph=GraphSpec(
            nodes=names,
            walks=(
                Walk("prefill", Step(NODE), then="decode"),
                Walk("decode", Loop("decode", Step(NODE))),
                *extra,
            ),
            entry="prefill",
        ),
        submodules={n: TimerNode(device, kv and n == NODE) for n in names},
        resources=(NodeResourceSpec("kv", "paged_kv", (NODE,), options=history),) if kv else (),
        next_walk=lambda walk, facts: DONE,
        context=1 << 20,
        vocab=1000,
    )


@dataclass(frozen=True, slots=True)
class Steady:
    """Steps of steady decode. `gaps`: seconds that the device had nothing to do before each;
    `cpu`: µs of CPU a step, by thread and in all (`process`)."""

    step_s: float
    gaps: list[float]
    cpu: dict[str, float]

    @property
    def ratio(self) -> float:
        """Idle ÷ busy."""
        return sum(self.gaps) / (len(self.gaps) * self.step_s)

    @property
    def late(self) -> float:
        """Share of the steps that found the device idle for more than 1 % of a step."""
        return sum(gap > 0.01 * self.step_s for gap in self.gaps) / len(self.gaps)

    def windows(self, size: int) -> list[float]:
        """Idle ÷ busy of each stretch of `size` steps."""
        starts = range(0, max(1, len(self.gaps) - size + 1), size)
        parts = [self.gaps[i : i + size] for i in starts]
        return [sum(p) / (len(p) * self.step_s) for p in parts]


class _Quiet:
    name = "w0"

    def say(self, level: str, text: str) -> None: ...

    def last_words(self, text: str) -> None:
        print(text, file=sys.stderr)

    def detach(self) -> None: ...

    def close(self) -> None: ...


def steady(
    *,
    step_s: float,
    depth: int,
    rows: int,
    steps: int,
    prompt: int = 4,
    kv: bool = False,
    nodes: int = 1,
) -> Steady:
    """Bring `rows` rows into steady decode, and watch the next `steps` steps."""
    device = TimerDevice(step_s)
    config = parse(
        {
            "models": {"m": {"kind": "reference"}},
            "workers": [{"name": "w0", "depth": depth, "threads": 1}],
        }
    )
    assert config.workers != "auto"
    worker = Worker(config, config.workers[0], LIFE, _Quiet(), engine=Engine(device))  # type: ignore[arg-type]
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    network = ZmqNetwork()
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        peer = _Peer(Path(folder), rows, prompt, steps)
        try:
            worker.gpu.start()
            loaded = model(device, kv, nodes)
            pages = 2 + rows * ((prompt + steps + 2000) // 16 + 2) if kv else None
            worker.gpu.call(lambda: worker.engine.load_model("m", loaded, pages=pages))
            worker.loaded = {"m": loaded}
            loop = worker.wire(network, f"ipc://{folder}/control.sock", None)
            worker.link.open()
            return _watch(worker, device, loop, rows, steps)
        finally:
            worker.close(network, 0)
            peer.close()
            sys.setswitchinterval(before)


def _watch(worker: Worker, device: TimerDevice, loop: Any, rows: int, steps: int) -> Steady:
    limit = time.monotonic() + BOUND_S
    launches = device.launches

    def turn() -> None:
        if loop.turn() is not None or time.monotonic() > limit:
            raise AssertionError(f"the worker left, or hangs after {len(launches)} launches")

    while len(launches) < WARM_STEPS or any(n != rows for n, _ in launches[-WARM_STEPS:]):
        turn()
    gc.collect()
    gc.freeze()
    first = len(launches)
    cpu = _cpu()
    while len(launches) < first + steps:
        turn()
    spent = {name: now - cpu[name] for name, now in _cpu().items()}
    gc.unfreeze()
    seen = launches[first : first + steps]
    assert all(n == rows for n, _ in seen), "the batch was not steady"
    done = len(launches) - first
    return Steady(
        step_s=device.step_s,
        gaps=[idle for _, idle in seen],
        cpu={name: 1e6 * s / done for name, s in spent.items()},
    )


def _cpu() -> dict[str, float]:
    """CPU seconds so far of this worker's threads, and of the process."""
    threads = {t.name: t.ident for t in threading.enumerate() if t.is_alive()}
    threads["main"] = threading.get_ident()
    found = {
        name: time.clock_gettime(time.pthread_getcpuclockid(ident))
        for name in THREADS
        if (ident := threads.get(name)) is not None
    }
    return {**found, "process": time.process_time()}


class _Peer:
    def __init__(self, folder: Path, rows: int, prompt: int, steps: int) -> None:
        options = {"folder": str(folder), "rows": rows, "prompt": prompt, "max_steps": steps + 2000}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.timer_peer", json.dumps(options)],
            stdin=subprocess.PIPE,
            cwd=record.ROOT,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

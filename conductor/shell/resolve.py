"""From the configuration as written to what will run: workers, devices, threads, sources.

The only place that looks at the machine on behalf of the configuration, and it does so without
torch. The environment comes in as a mapping.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from protocol.channel.endpoints import Endpoints
from protocol.config import ON_CPU, DaemonConfig, WorkerConfig, runtime_dir
from protocol.errors import ConfigError
from protocol.sources import resolve_source

_GPU_NODE = re.compile(r"nvidia\d+")
_NVIDIA_SMI_S = 10.0
_WEIGHTLESS = ("reference",)  # model kinds that need no source


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def visible_gpus(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """How many GPUs a child started with this environment will see."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    present = _present_gpus(dev)
    if chosen is None:
        return present
    count = 0
    for entry in chosen.split(","):
        name = entry.strip()
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= present):
            break  # CUDA ignores this entry and all that follow
        count += 1
    return min(count, present)


def _present_gpus(dev: Path) -> int:
    nodes = [p for p in dev.iterdir() if _GPU_NODE.fullmatch(p.name)] if dev.is_dir() else []
    if nodes:
        return len(nodes)
    tool = shutil.which("nvidia-smi")  # WSL has GPUs without device nodes
    if tool is None or dev != Path("/dev"):
        return 0
    try:
        listed = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def resolve(config: DaemonConfig, *, gpus: int, cores: int) -> DaemonConfig:
    """Every worker listed with its device and threads, and the runtime directory absolute.

    Raises `ConfigError` where a worker names a GPU that is not visible.
    """
    workers = _auto(gpus) if config.workers == "auto" else config.workers
    on_cpu = sum(w.device in ON_CPU for w in workers)
    resolved: list[WorkerConfig] = []
    for w in workers:
        device = "cuda:0" if w.device == "cuda" else w.device
        if device not in ON_CPU and int(device.partition(":")[2]) >= gpus:
            seen = f"{gpus} visible" if gpus else "none is visible"
            raise ConfigError(f"workers.{w.name}.device: {w.device} is not there; GPUs: {seen}")
        share = on_cpu if device in ON_CPU else len(workers)
        threads = w.threads or max(1, cores // share)
        resolved.append(w.model_copy(update={"device": device, "threads": threads}))
    root = str(runtime_dir(config))
    return config.model_copy(update={"workers": tuple(resolved), "runtime_dir": root})


def _auto(gpus: int) -> tuple[WorkerConfig, ...]:
    if gpus:
        return tuple(WorkerConfig(name=f"w{i}", device=f"cuda:{i}") for i in range(gpus))
    return (WorkerConfig(name="w0", device="cpu"),)


def preflight(config: DaemonConfig) -> dict[str, Path | None]:
    """What can be known to be wrong before a process is started (P20). Returns model → its files.

    Raises `ConfigError` with the path in the configuration and what to do.
    """
    Endpoints(runtime_dir(config)).stream((1 << 64) - 1)
    found: dict[str, Path | None] = {}
    for name, model in config.models.items():
        if not model.source and model.kind in _WEIGHTLESS:
            found[name] = None
            continue
        try:
            found[name] = resolve_source(model.source)
        except ConfigError as e:
            raise ConfigError(f"models.{name}.{e.message}", **e.detail) from None
    if config.gateway is not None:
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"gateway: the package {package!r} is not installed: pip install "
                    "'podium[gateway]', or set gateway: null to serve ZeroMQ clients only"
                )
    return found

"""Models from the configuration into the engine, on the GPU thread."""

import time
from collections.abc import Callable, Mapping

import torch

from protocol.config import DaemonConfig, ModelConfig, WorkerConfig
from protocol.errors import ConfigError
from protocol.sources import resolve_source
from worker.api.model import BuildContext, LoadedModel
from worker.api.registry import load_builder
from worker.device.base import Device
from worker.engine.engine import CPU_KV_BYTES, GPU_KV_SHARE, Engine

PROGRESS_EVERY_S = 0.2
MIB = 1 << 20

Progress = Callable[..., None]  # (phase, **figures)


def own_section(config: DaemonConfig, name: str) -> WorkerConfig:
    """This worker's part of the configuration. Raises `ConfigError` where it has none."""
    if config.workers == "auto":
        raise ConfigError("workers: 'auto' was not resolved; the conductor writes the list")
    for w in config.workers:
        if w.name == name:
            return w
    raise ConfigError(
        f"workers: none is called {name!r}; known: {[w.name for w in config.workers]}"
    )


def placed_models(config: DaemonConfig, worker: WorkerConfig) -> dict[str, ModelConfig]:
    names = worker.models if worker.models is not None else tuple(config.models)
    return {n: config.models[n] for n in names}


def make_device(name: str) -> Device:
    """Raises `ConfigError` where this machine has no such device."""
    if name == "cpu":
        from worker.device.cpu import CpuDevice

        return CpuDevice()
    if name == "cpu-async":
        from worker.device.cpu_async import CpuAsyncDevice

        return CpuAsyncDevice()
    index = int(name.partition(":")[2] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ConfigError(f"device {name}: not there; CUDA devices visible: {seen}")
    from worker.device.cuda import CudaDevice

    return CudaDevice(index)


def resolve_dtype(model: ModelConfig, device: Device) -> torch.dtype:
    """`auto`: float32 on a CPU, bfloat16 on a GPU."""
    if model.dtype == "auto":
        return torch.float32 if device.torch_device.type == "cpu" else torch.bfloat16
    return getattr(torch, model.dtype)


def load_models(
    engine: Engine, models: Mapping[str, ModelConfig], progress: Progress
) -> dict[str, LoadedModel]:
    """Build every model, then size the KV pools: on a GPU they share what the weights left.

    Raises `ConfigError` for what a restart cannot help.
    """
    if engine.device.torch_device.type == "cuda":
        torch.cuda.set_device(engine.device.torch_device)  # per thread; this one starts at GPU 0
    loaded = {n: _build(engine.device, n, m, progress) for n, m in models.items()}
    sized = [n for n, m in models.items() if m.pages is None and m.kv_memory_mib is None]
    share = _free_for_kv(engine.device) // max(1, len(sized))
    for name, model in models.items():
        kv_bytes = share if model.kv_memory_mib is None else model.kv_memory_mib * MIB
        progress("pages", model=name)
        try:
            engine.load_model(name, loaded[name], pages=model.pages, kv_bytes=kv_bytes)
        except (ValueError, KeyError) as e:
            raise ConfigError(f"models.{name}: {e}") from e
    return loaded


def _free_for_kv(device: Device) -> int:
    if device.torch_device.type == "cpu":
        return CPU_KV_BYTES
    return int(device.memory()[0] * GPU_KV_SHARE)


def _build(device: Device, name: str, model: ModelConfig, progress: Progress) -> LoadedModel:
    told = 0.0

    def tell(done: int, total: int, what: str) -> None:
        nonlocal told
        now = time.monotonic()
        if done >= total or now - told >= PROGRESS_EVERY_S:
            told = now
            progress("load", model=name, done=done, total=total, what=what)

    build = load_builder(model.kind)
    source = str(resolve_source(model.source)) if model.source else ""
    context = BuildContext(
        name=name,
        source=source,
        device=device.torch_device,
        dtype=resolve_dtype(model, device),
        context=model.context,
        options=model.options,
        progress=tell,
    )
    with torch.no_grad():
        return build(context)

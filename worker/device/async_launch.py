"""The dispatch mode of the cpu-async device: every eager operator becomes a launch.

An operator's outputs are allocated at once, poisoned, with the shape that its meta kernel gives;
the kernel itself is queued with its arguments, so it sees what they hold when it runs and not when
it was launched. Views and allocations happen at once, as they touch no value. Operators that read
a value, and methods that list one (`tolist`, `numpy`), are refused on a launching thread; on the
postprocess thread they wait for its stream first, as on CUDA, and refuse poison.

A host tensor and a device tensor are one kind here, so a read of either is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from worker.device import poison
from worker.device.async_streams import AsyncStream

aten = torch.ops.aten

KEPT_SHAPES = 8192


class ValueRead(RuntimeError):
    """A thread that launches read a tensor's value: on a GPU it would have waited for the device
    (E26)."""


class NoLaunch(RuntimeError):
    """An operator that can't be launched here: it is random, or torch has no shape rule for it."""


class Launcher(Protocol):
    def launch(self, name: str, kernel: Callable[[], None], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread launches to: `launcher` is the stream, or a graph that is being captured."""

    stream: AsyncStream
    launcher: Launcher
    may_read: bool = False

    @property
    def capturing(self) -> bool:
        return self.launcher is not self.stream

    def read(self, what: str, tensors: list[torch.Tensor]) -> None:
        """Called before a read. Raises `ValueRead`, or `PoisonRead` where it comes too early."""
        if not self.may_read:
            raise ValueRead(f"{what} reads a tensor's value on a thread that launches")
        self.stream.synchronize()
        for t in tensors:
            poison.check(t, what)


class Kind(Enum):
    AT_ONCE = auto()  # a view, or a question about shapes
    ALLOCATES = auto()
    READS = auto()
    RANDOM = auto()
    KERNEL = auto()


_ALLOCATES = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty,
    aten.new_empty_strided,
}  # fmt: skip
_READS = {aten.is_nonzero, aten.item, aten._linalg_check_errors}
_INDEXED = {aten.index, aten.index_put, aten.index_put_}
"""They read a mask's values, and nothing of an index of integers; their tag says the worse."""


@cache
def kind_of(func: Any) -> Kind:
    tags, packet = func.tags, func.overloadpacket
    if packet in _ALLOCATES:
        return Kind.ALLOCATES
    reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    if packet in _READS or (reads and packet not in _INDEXED):
        return Kind.READS
    if func.is_view or torch.Tag.inplace_view in tags:
        return Kind.AT_ONCE
    returns = func._schema.returns
    if returns and not any("Tensor" in str(r.type) for r in returns):
        return Kind.AT_ONCE
    return Kind.RANDOM if torch.Tag.nondeterministic_seeded in tags else Kind.KERNEL


class LaunchMode(TorchDispatchMode):
    """`place()`: the calling thread's; a mode is of one thread alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode; to say so to torch's compiler costs its import."""
        return False

    def __init__(self, place: Callable[[], Place]) -> None:
        super().__init__()
        self._place = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind is Kind.AT_ONCE:
            return func(*args, **kwargs)
        if kind is Kind.ALLOCATES:
            return poison.poison(func(*args, **kwargs))
        if kind is Kind.READS or (func.overloadpacket in _INDEXED and _masked(args[1])):
            self._place().read(str(func), _tensors(args, kwargs))
            return func(*args, **kwargs)
        if kind is Kind.RANDOM and _argument(func, "dropout_p", args, kwargs) != 0.0:
            raise NoLaunch(f"{func} is random: draw from keys, as the sampler does")
        return launch(self._place().launcher, func, args, kwargs)


class ListingMode(TorchFunctionMode):
    """Methods that hand out values without an operator."""

    LISTS = (
        torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__,
        torch.Tensor.__repr__, torch.Tensor.__format__,
    )  # fmt: skip

    def __init__(self, place: Callable[[], Place]) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.LISTS:
            self._place().read(f"Tensor.{func.__name__}", [args[0]])
        return func(*args, **(kwargs or {}))


# ---- a launch


def launch(launcher: Launcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Queue `func`; returns what it returns: fresh outputs poisoned, written arguments as they are.

    Raises what is wrong with shapes or dtypes at once, as a GPU launch does.
    """
    written = _written(func, args, kwargs)
    shaped = _shapes(func, args, kwargs)
    returns: list[Any] = []
    fresh: list[Any] = []
    for spec, shape in zip(func._schema.returns, shaped, strict=True):
        if spec.alias_info is not None and spec.alias_info.is_write:
            returns.append(written[frozenset(spec.alias_info.before_set)])
            fresh.append(None)
        else:
            made = pytree.tree_map_only(_Shape, _Shape.make, shape)
            returns.append(made)
            fresh.append(made)

    def kernel() -> None:
        found = func(*args, **kwargs)
        for into, value in zip(fresh, found if len(fresh) > 1 else (found,), strict=False):
            _fill(into, value)

    launcher.launch(func.overloadpacket.__name__, kernel)
    if len(returns) == 1:
        return returns[0]
    return tuple(returns) if returns else None


def _fill(into: Any, value: Any) -> None:
    if isinstance(into, torch.Tensor):
        into.copy_(value)
    elif isinstance(into, list | tuple):
        for i, v in zip(into, value, strict=True):
            _fill(i, v)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[frozenset[str], Any]:
    """Alias set → the argument that the operator writes."""
    found: dict[frozenset[str], Any] = {}
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            key = frozenset(a.alias_info.before_set)
            found[key] = kwargs[a.name] if a.name in kwargs else args[i]
    return found


@dataclass(frozen=True, slots=True)
class _Shape:
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> "_Shape":
        return cls(t.shape, t.stride(), t.dtype)

    def make(self) -> torch.Tensor:
        return poison.poison(torch.empty_strided(self.size, self.stride, dtype=self.dtype))


_kept: dict[Any, tuple[Any, ...]] = {}


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the operator returns, as one entry a return, tensors as `_Shape`."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    key = (func, str(structure), tuple(_identity(x) for x in flat))
    known = _kept.get(key)
    if known is None:
        if len(_kept) >= KEPT_SHAPES:
            _kept.clear()
        known = _kept[key] = _by_meta(func, args, kwargs)
    return known


def _identity(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return (x.shape, x.stride() if x.layout is torch.strided else None, x.dtype)
    return (type(x), x)  # 1, 1.0 and True are equal and mean different dtypes


def _by_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    twins = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
    if any(a.name == "device" for a in func._schema.arguments):
        twins[1]["device"] = "meta"
    try:
        found = func(*twins[0], **twins[1])
    except NotImplementedError as e:
        raise NoLaunch(f"{func}: torch has no shape rule for it, so it can't be launched") from e
    found = found if len(func._schema.returns) > 1 else (found,)[: len(func._schema.returns)]
    return tuple(pytree.tree_map_only(torch.Tensor, _Shape.of, list(found)))


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided:  # a kernel library's own layout, of packed weights
        return torch.empty(t.shape, dtype=t.dtype, device="meta")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _masked(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument's value by name, its default where it was not passed; None: no such argument."""
    for i, a in enumerate(func._schema.arguments):
        if a.name == name:
            return kwargs.get(name, args[i] if i < len(args) else a.default_value)
    return None

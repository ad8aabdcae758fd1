"""Per-request state that an author keeps between steps."""

from collections.abc import Callable, Iterator


class PerRequestState:
    """Base for an author's per-request state. `release` frees what it holds outside Python."""

    def release(self) -> None:
        """Called once, when the request is removed. The default holds nothing to free."""


class LazyRequestStates:
    """Request id → state, made by `factory` on first use; `remove` is idempotent."""

    def __init__(self, factory: Callable[[int], PerRequestState]) -> None:
        self._factory = factory
        self._states: dict[int, PerRequestState] = {}

    def __getitem__(self, request_id: int) -> PerRequestState:
        state = self._states.get(request_id)
        if state is None:
            state = self._states[request_id] = self._factory(request_id)
        return state

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def remove(self, request_id: int) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            state.release()

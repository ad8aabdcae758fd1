"""Which token ids end a request: pure, shared by the scheduler and the postprocess thread."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from protocol.errors import InvalidRequest


def stop_ids(params: Mapping[str, Any], eos: Iterable[int]) -> frozenset[int]:
    """`stop_token_ids`, and the model's own `eos` unless `ignore_eos`.

    Raises `InvalidRequest` where the parameter is no list of token ids.
    """
    asked = params.get("stop_token_ids") or ()
    if not isinstance(asked, list | tuple):
        raise InvalidRequest(f"stop_token_ids: a list of token ids is expected, got {asked!r}")
    ids: list[int] = []
    for t in cast(Sequence[Any], asked):
        if type(t) is not int or not 0 <= t < 1 << 32:
            raise InvalidRequest(f"stop_token_ids: {t!r} is no token id")
        ids.append(t)
    return frozenset(ids) if params.get("ignore_eos") else frozenset(ids).union(eos)

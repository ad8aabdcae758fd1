"""A request's body, bounded, and the news that its client left."""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from protocol.errors import InvalidRequest


class BodyTooLarge(InvalidRequest):
    code, status = "body_too_large", 413


class ClientLeft(Exception):
    """The connection closed before the body was whole: there is nobody to answer."""


async def read_json(request: Request, limit: int) -> Any:
    """Raises `BodyTooLarge` (before reading, if a length was declared), `InvalidRequest`,
    `ClientLeft`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            break
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if b"\\u" in body:  # half of a surrogate pair is JSON, but no text
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}") from None


async def when_client_leaves(receive: Receive, act: Callable[[], None]) -> None:
    """Runs beside the answer; for a body that was read whole."""
    while (await receive())["type"] != "http.disconnect":
        pass
    act()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes", limit=limit)

"""Server-sent events for OpenAI streams.

Written here and not taken from sse-starlette: that ends every stream as soon as the server is told
to exit, where a drain must let streams finish; and starlette's StreamingResponse notices a client
that left only when it next writes, where a row must be freed at once.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive, Scope, Send

from protocol import faults

DONE = "[DONE]"
_EVENT = faults.point("gateway.event")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect events
]


class EventStream:
    """A response whose body is one `data:` event per item: an object as JSON, a string as it is."""

    def __init__(self, events: AsyncIterator[dict[str, Any] | str]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for event in self._events:
            if _EVENT.act is not None:
                _EVENT.act()
            await send({"type": "http.response.body", "body": encode(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def encode(event: dict[str, Any] | str) -> bytes:
    """One event; JSON is written on one line, so no line of it needs a prefix of its own."""
    text = event if isinstance(event, str) else _json(event)
    return f"data: {text}\n\n".encode()


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

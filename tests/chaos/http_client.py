"""The same as `client`, through the gateway: server-sent events in, the checker's events out."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.chaos.history import End, Event, Tokens
from tests.chaos.scenario import Ask

Emit = Callable[[Event], None]


def body(ask: Ask) -> dict[str, Any]:
    return {
        "model": ask.model,
        "messages": [{"role": "user", "content": bytes(ask.prompt).decode("ascii")}],
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
    }


async def ask_over_http(
    http: httpx.AsyncClient, url: Callable[[], str], ask: Ask, emit: Emit
) -> None:
    """One request, read to its end or left at `cancel_at`. What breaks on the way is an end too."""
    await asyncio.sleep(ask.wait_ms / 1000)
    try:
        end = await _read(http, url(), ask, emit)
    except (httpx.TransportError, FileNotFoundError) as e:  # no gateway, or not any more
        end = End(ask.key, "broken", f"{type(e).__name__}: {e}")
    emit(end)


async def _read(http: httpx.AsyncClient, url: str, ask: Ask, emit: Emit) -> End:
    count, reason = 0, ""
    if ask.cancel_at == 0:
        return End(ask.key, "cancelled")
    async with http.stream("POST", f"{url}/v1/chat/completions", json=body(ask)) as r:
        if r.status_code != 200:
            error = json.loads(await r.aread())["error"]
            return End(ask.key, _reason(error), f"{r.status_code}: {error['message']}")
        async for line in r.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return End(ask.key, reason or "broken", "[DONE] without a finish reason")
            event = json.loads(line[6:])
            if "error" in event:
                return End(ask.key, _reason(event["error"]), event["error"]["message"])
            choice = event["choices"][0]
            tokens = list((choice["delta"].get("content") or "").encode("ascii"))
            if tokens:
                emit(Tokens(ask.key, tokens))
                count += len(tokens)
            if ask.cancel_at is not None and count >= ask.cancel_at:
                return End(ask.key, "cancelled")
            reason = choice["finish_reason"] or reason
            await asyncio.sleep(ask.slow_ms / 1000)
    return End(ask.key, "broken", "the answer ended without [DONE]")


def _reason(error: dict[str, Any]) -> str:
    return str(error["code"])

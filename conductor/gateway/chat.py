"""`POST /v1/chat/completions`: a body in, an answer out, whole or streamed."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from conductor.gateway import openai_format
from conductor.gateway.completion import Completion
from conductor.gateway.gateway import Gateway
from conductor.gateway.openai_format import ChatAnswer
from conductor.gateway.openai_schema import ChatRequest, parse
from conductor.gateway.request_body import ClientLeft, read_json, when_client_leaves
from conductor.gateway.sse import DONE, EventStream
from conductor.gateway.stop_strings import StopStrings
from protocol import faults
from protocol.client.async_stream import AsyncStream
from protocol.errors import PodiumError
from protocol.messages import Reason

_REQUEST = faults.point("gateway.request")


class ChatEndpoint:
    """An ASGI application, so that a request's place and stream last until its answer is out.

    Errors up to the first token have their HTTP status; later ones are an event of the stream.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        with gateway.admitted():
            if _REQUEST.act is not None:
                _REQUEST.act()
            body = await read_json(Request(scope, receive), gateway.max_body)
            request, ignored = parse(body)
            gateway.ignore(ignored)
            tokenizer = gateway.tokenizer(request.model)
            tokens = await gateway.prompt(tokenizer, request)
            with gateway.stream(request, tokens) as stream:
                watcher = asyncio.ensure_future(when_client_leaves(receive, stream.cancel))
                try:
                    completion = Completion(
                        stream, tokenizer.detokenizer(), StopStrings(request.stops)
                    )
                    answer = self._answer(request)
                    reply = _stream if request.stream else _whole
                    response = await reply(request, answer, completion, len(tokens))
                    await response(scope, receive, send)
                finally:
                    _note(scope, stream, len(tokens))
                    watcher.cancel()
                    with suppress(asyncio.CancelledError):
                        await watcher

    def _answer(self, request: ChatRequest) -> ChatAnswer:
        return ChatAnswer(
            f"chatcmpl-{secrets.token_hex(12)}",
            request.model,
            int(self._gateway.clock.wall()),
            request.include_usage,
        )


async def _whole(
    request: ChatRequest, answer: ChatAnswer, completion: Completion, prompt_tokens: int
) -> JSONResponse:
    text = "".join([piece async for piece in completion])
    if completion.reason is Reason.CANCELLED:
        raise ClientLeft
    used = openai_format.usage(prompt_tokens, completion.stream.count)
    return JSONResponse(answer.whole(text, completion.reason, used))


async def _stream(
    request: ChatRequest, answer: ChatAnswer, completion: Completion, prompt_tokens: int
) -> EventStream:
    """Waits for the first piece: what fails before it still has an HTTP status of its own."""
    pieces = aiter(completion)
    first = await anext(pieces, None)
    if first is None and completion.reason is Reason.CANCELLED:
        raise ClientLeft

    async def events() -> AsyncIterator[dict[str, Any] | str]:
        yield answer.chunk({"role": "assistant", "content": ""})
        try:
            if first is not None:
                yield answer.chunk({"content": first})
                async for piece in pieces:
                    yield answer.chunk({"content": piece})
        except PodiumError as e:
            yield openai_format.describe(e)
            return
        if completion.reason is Reason.CANCELLED:
            return  # the client left; a stream that was cut must not look finished
        yield answer.chunk({}, openai_format.finish_reason(completion.reason))
        if request.include_usage:
            used = openai_format.usage(prompt_tokens, completion.stream.count)
            yield answer.usage_chunk(used)
        yield DONE

    return EventStream(events())


def _note(scope: Scope, stream: AsyncStream, prompt_tokens: int) -> None:
    """For the access log."""
    scope["podium.notes"] = {
        "reason": stream.reason.name.lower(),
        "prompt_tokens": prompt_tokens,
        "tokens": stream.count,
        **({"attempt": stream.attempt} if stream.attempt > 1 else {}),
    }

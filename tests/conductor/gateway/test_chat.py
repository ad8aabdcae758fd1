"""Chat completions over ASGI, against a fake daemon that serves the byte model."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
import structlog
from starlette.applications import Starlette

from conductor.gateway import gateway as gateway_module
from conductor.gateway.app import make_app
from conductor.gateway.gateway import Gateway
from conductor.gateway.health import Health
from conductor.gateway.tokenizer import ByteTokenizer, Messages
from protocol.errors import CannotFit, Overloaded, PodiumError, PromptTooLong, WorkerLost
from protocol.messages import Reason
from tests.support.fake_daemon import FakeDaemon, prompt_of

HI: dict[str, Any] = {"model": "ref", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [x if (x := line[6:]) == "[DONE]" else json.loads(x) for line in lines]


def shown(chunks: list[Any]) -> str:
    return "".join(
        c["choices"][0]["delta"].get("content", "")
        for c in chunks
        if c != "[DONE]" and c.get("choices")
    )


# ---- answers


async def test_a_whole_answer(http: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    daemon.auto = lambda s: [*b"hello", 256]
    r = await http.post(PATH, json={**HI, "max_tokens": 9, "temperature": 0, "seed": 5})
    assert r.status_code == 200
    body = r.json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "ref")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "length"  # as the fake daemon ends
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    (submit,) = daemon.submits
    assert (submit.model, prompt_of(submit)) == ("ref", list(b"hi"))
    assert submit.params == {"max_tokens": 9, "temperature": 0.0, "top_p": 1.0, "seed": 5}
    assert submit.deadline_ms == 60_000


async def test_sampling_defaults_are_those_of_openai(
    http: httpx.AsyncClient, daemon: FakeDaemon
) -> None:
    daemon.auto = lambda s: [97]
    await http.post(PATH, json={**HI, "top_k": -1, "stop_token_ids": [7], "ignore_eos": True})
    assert daemon.submits[0].params == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [7], "ignore_eos": True,
    }  # fmt: skip


async def test_a_streamed_answer(http: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    daemon.auto = lambda s: list("né🙂".encode())
    r = await http.post(PATH, json={**HI, "stream": True})
    assert r.headers["content-type"].startswith("text/event-stream")
    chunks = events(r.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert shown(chunks) == "né🙂"
    assert "�" not in r.text
    assert chunks[-2]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert chunks[-1] == "[DONE]"
    assert len({c["id"] for c in chunks[:-1]}) == 1
    assert all(c["object"] == "chat.completion.chunk" for c in chunks[:-1])
    assert "usage" not in chunks[0]


async def test_usage_comes_last_when_asked_for(http: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    daemon.auto = lambda s: [*b"abc"]
    options = {"include_usage": True}
    r = await http.post(PATH, json={**HI, "stream": True, "stream_options": options})
    chunks = events(r.text)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert all(c["usage"] is None for c in chunks[:-2])


async def test_an_empty_answer(http: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    daemon.auto = lambda s: [256]
    whole = await http.post(PATH, json=HI)
    assert whole.json()["choices"][0]["message"]["content"] == ""
    streamed = events((await http.post(PATH, json={**HI, "stream": True})).text)
    assert [c["choices"][0]["finish_reason"] for c in streamed[:-1]] == [None, "length"]


# ---- stop strings


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_that_straddles_tokens(
    http: httpx.AsyncClient, daemon: FakeDaemon, stream: bool
) -> None:
    asking = asyncio.ensure_future(http.post(PATH, json={**HI, "stop": "END", "stream": stream}))
    await daemon.until(lambda: daemon.submits)
    (number,) = daemon.owner_of
    for letter in b"say EN":
        daemon.emit(number, [letter])
    await daemon.until(lambda: not daemon.worker.unacknowledged(daemon.owner_of[number]))
    daemon.emit(number, list(b"D and more"))  # the daemon never ends the stream itself
    r = await asking
    await daemon.until(lambda: daemon.closed)
    assert daemon.closed == [(number, 1, Reason.STOP, 16)]
    if stream:
        chunks = events(r.text)
        assert shown(chunks) == "say "
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1] == "[DONE]"
    else:
        (choice,) = r.json()["choices"]
        assert choice["message"]["content"] == "say "
        assert choice["finish_reason"] == "stop"


async def test_held_back_text_comes_out_at_the_end(
    http: httpx.AsyncClient, daemon: FakeDaemon
) -> None:
    daemon.auto = lambda s: [*b"the EN"]
    r = await http.post(PATH, json={**HI, "stop": ["END"], "stream": True})
    assert shown(events(r.text)) == "the EN"


# ---- failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", retry_after=2.2), 429, "rate_limit_error"),
        (
            PromptTooLong("9 tokens; the context is 8", prompt_tokens=9),
            400,
            "invalid_request_error",
        ),
        (CannotFit("never fits"), 400, "invalid_request_error"),
        (WorkerLost("w0 died"), 503, "server_error"),
    ],
)
async def test_what_fails_before_the_first_token_has_its_status(
    http: httpx.AsyncClient, daemon: FakeDaemon, *, stream: bool, error: PodiumError, status: int,
    kind: str,
) -> None:  # fmt: skip
    daemon.auto = lambda s: error
    r = await http.post(PATH, json={**HI, "stream": stream})
    assert r.status_code == status
    assert r.json() == {
        "error": {"message": error.message, "type": kind, "param": None, "code": error.code}
    }
    assert r.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


async def test_a_failure_in_the_stream_is_its_last_event(
    http: httpx.AsyncClient, daemon: FakeDaemon
) -> None:
    asking = asyncio.ensure_future(http.post(PATH, json={**HI, "stream": True, "stop": "bX"}))
    await daemon.until(lambda: daemon.submits)
    (number,) = daemon.owner_of
    daemon.emit(number, list(b"ab"))
    await daemon.until(lambda: not daemon.worker.unacknowledged(daemon.owner_of[number]))
    daemon.end(number, Reason.WORKER_LOST, error=WorkerLost("w0 died", worker="w0"))
    r = await asking
    assert r.status_code == 200
    chunks = events(r.text)
    assert shown(chunks[:-1]) == "ab"  # with what a stop string had held back
    assert chunks[-1] == {
        "error": {
            "message": "w0 died", "type": "server_error", "param": None, "code": "worker_lost",
        }
    }  # fmt: skip


async def test_a_failure_midway_of_a_whole_answer_is_its_status(
    http: httpx.AsyncClient, daemon: FakeDaemon
) -> None:
    asking = asyncio.ensure_future(http.post(PATH, json=HI))
    await daemon.until(lambda: daemon.submits)
    (number,) = daemon.owner_of
    daemon.emit(number, [97])
    daemon.end(number, Reason.DEADLINE)
    assert (await asking).status_code == 504


async def test_a_rebase_is_not_seen(http: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    asking = asyncio.ensure_future(http.post(PATH, json={**HI, "stream": True}))
    await daemon.until(lambda: daemon.submits)
    (number,) = daemon.owner_of
    daemon.emit(number, list(b"ab"))
    await daemon.until(lambda: not daemon.worker.unacknowledged(daemon.owner_of[number]))
    daemon.rebase(number, 2)
    await daemon.until(lambda: daemon.histories)
    daemon.emit(number, list(b"bc"), first=1)
    daemon.finish(number, Reason.STOP)
    chunks = events((await asking).text)
    assert shown(chunks) == "abc"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("content", "status", "param", "code"),
    [
        (b"{", 400, None, "invalid_request"),
        (b"[" * 5000, 400, None, "invalid_request"),
        (json.dumps({**HI, "user": "\ud800"}).encode(), 400, None, "invalid_request"),
        (b'{"a": NaN}', 400, None, "invalid_request"),
        (b"\xff", 400, None, "invalid_request"),
        (b"[]", 400, None, "invalid_request"),
        (json.dumps({**HI, "top_p": 3}).encode(), 400, "top_p", "invalid_request"),
        (json.dumps({**HI, "model": "gpt-7"}).encode(), 404, "model", "unknown_model"),
        (b" " * 100_001, 413, None, "body_too_large"),
    ],
)
async def test_requests_that_are_refused(
    http: httpx.AsyncClient, daemon: FakeDaemon, *, content: bytes, status: int, param: str | None,
    code: str,
) -> None:  # fmt: skip
    r = await http.post(PATH, content=content)
    assert r.status_code == status
    error = r.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert daemon.submits == []


async def test_a_body_of_unknown_length_is_bounded_too(http: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 10_000

    r = await http.post(PATH, content=endless())
    assert r.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", PATH, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/models/gpt-7", 404, "unknown_model"),
    ],
)
async def test_paths_and_methods_that_are_not_there(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    r = await http.request(method, path)
    assert (r.status_code, r.json()["error"]["code"]) == (status, code)


async def test_models(http: httpx.AsyncClient, gateway: Gateway) -> None:
    one = {"id": "ref", "object": "model", "created": gateway.created, "owned_by": "podium"}
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": [one]}
    assert (await http.get("/v1/models/ref")).json() == one


async def test_a_bug_is_answered_and_logged(
    http: httpx.AsyncClient, gateway: Gateway, daemon: FakeDaemon,
    logged: structlog.testing.CapturingLoggerFactory, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async def broken(*args: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(gateway, "prompt", broken)
    r = await http.post(PATH, json=HI)
    assert r.status_code == 500
    assert "secret" not in r.text
    assert any(call.method_name == "error" for call in logged.logger.calls)


# ---- ignored fields, ids, log


async def test_ignored_fields_are_logged_once_and_counted(
    http: httpx.AsyncClient, gateway: Gateway, daemon: FakeDaemon,
    logged: structlog.testing.CapturingLoggerFactory,
) -> None:  # fmt: skip
    daemon.auto = lambda s: [97]
    for _ in range(3):
        assert (await http.post(PATH, json={**HI, "user": "u"})).status_code == 200
    assert gateway.statistics()["ignored_user"] == 3
    told = [c for c in logged.logger.calls if c.kwargs.get("field") == "user"]
    assert len(told) == 1


async def test_names_of_ignored_fields_are_bounded(gateway: Gateway) -> None:
    gateway.ignore([f"x{i}" for i in range(1000)])
    assert len(gateway.ignored) == gateway_module.MAX_NAMES + 1
    assert gateway.ignored["(others)"] == 1000 - gateway_module.MAX_NAMES


async def test_request_ids(http: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    daemon.auto = lambda s: [97]
    given = await http.post(PATH, json=HI, headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    minted = await http.get("/nothing", headers={"X-Request-Id": "bad id"})
    assert minted.headers["x-request-id"].startswith("req-")


async def test_the_log_has_a_line_a_request(
    http: httpx.AsyncClient, daemon: FakeDaemon,
    logged: structlog.testing.CapturingLoggerFactory,
) -> None:  # fmt: skip
    daemon.auto = lambda s: [97, 98]
    await http.post(PATH, json=HI, headers={"X-Request-Id": "abc-1"})
    line = logged.logger.calls[-1].kwargs
    assert line["event"] == f"POST {PATH}"
    assert (line["status"], line["request_id"]) == (200, "abc-1")
    assert (line["reason"], line["prompt_tokens"], line["tokens"]) == ("length", 2, 2)


# ---- long prompts


async def test_long_prompts_are_tokenized_off_the_loop(
    http: httpx.AsyncClient, gateway: Gateway, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.auto = lambda s: [97]
    inside, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    threads: list[str] = []

    class Slow(ByteTokenizer):
        def render(self, messages: Messages) -> str:
            text = super().render(messages)
            threads.append(threading.current_thread().name)
            if len(text) > gateway_module.INLINE:
                loop.call_soon_threadsafe(inside.set)
                assert leave.wait(10)
            return text

    monkeypatch.setattr(gateway, "tokenizer", lambda model: Slow())
    long = {"model": "ref", "messages": [{"role": "user", "content": "x" * 5000}]}
    waiting = asyncio.ensure_future(http.post(PATH, json=long))
    await inside.wait()
    assert (await http.post(PATH, json=HI)).status_code == 200  # the loop goes on meanwhile
    leave.set()
    assert (await waiting).status_code == 200
    assert threads[0].startswith("tokenize")
    assert threads[1] == threading.current_thread().name


# ---- starting, draining, limits


async def test_while_starting(starting: Gateway, health: Health) -> None:
    transport = httpx.ASGITransport(make_app(starting, health))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        r = await http.post(PATH, json=HI)
        assert (r.status_code, r.json()["error"]["code"]) == (503, "unavailable")
        assert r.headers["retry-after"] == "1"
        assert (await http.get("/v1/models")).status_code == 200


async def test_draining_finishes_what_is_open(
    http: httpx.AsyncClient, gateway: Gateway, daemon: FakeDaemon
) -> None:
    asking = asyncio.ensure_future(http.post(PATH, json={**HI, "stream": True}))
    await daemon.until(lambda: daemon.submits)
    draining = asyncio.ensure_future(gateway.drain(30))
    await asyncio.sleep(0)
    refused = await http.post(PATH, json=HI)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
    assert (await http.get("/readyz")).status_code == 503
    assert not draining.done()
    daemon.finish(1, tokens=[97])
    assert events((await asking).text)[-1] == "[DONE]"
    assert await draining


async def test_what_outlasts_the_drain_is_told(
    http: httpx.AsyncClient, gateway: Gateway, daemon: FakeDaemon
) -> None:
    asking = asyncio.ensure_future(http.post(PATH, json={**HI, "stream": True}))
    await daemon.until(lambda: daemon.submits)
    daemon.emit(1, [97])
    await daemon.until(lambda: not daemon.worker.unacknowledged(daemon.owner_of[1]))
    assert not await gateway.drain(0)
    last = events((await asking).text)[-1]
    assert last["error"]["code"] == "unavailable"
    await daemon.until(lambda: daemon.closed)
    assert daemon.closed == [(1, 1, Reason.ABORTED, 1)]


async def test_too_many_open_requests(
    http: httpx.AsyncClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "SPARE", -gateway.config.limits.max_queued)
    r = await http.post(PATH, json=HI)
    assert (r.status_code, r.headers["retry-after"]) == (429, "1")


async def test_every_way_out_gives_the_place_back(
    http: httpx.AsyncClient, gateway: Gateway, daemon: FakeDaemon
) -> None:
    daemon.auto = lambda s: [97]
    for body in (HI, {**HI, "stream": True}, {**HI, "n": 2}, {**HI, "model": "x"}):
        await http.post(PATH, json=body)
    assert gateway.statistics()["open"] == 0
    assert await gateway.drain(0)


async def test_an_answer_that_cannot_be_written_frees_its_row(
    app: Starlette, gateway: Gateway, daemon: FakeDaemon
) -> None:
    body = json.dumps({**HI, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body}]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    serving = asyncio.ensure_future(app(scope, receive, send))
    await daemon.until(lambda: daemon.submits)
    daemon.emit(1, [97])
    await daemon.until(lambda: daemon.closed)
    assert daemon.closed == [(1, 1, Reason.CANCELLED, 1)]
    await serving
    assert gateway.statistics()["open"] == 0


def test_the_app_is_made_without_a_server(app: Starlette) -> None:
    assert {getattr(r, "path", "") for r in app.routes} == {
        "/v1/models", "/v1/models/{name}", PATH, "/livez", "/readyz",
    }  # fmt: skip

"""Round every HTTP request: its id, its line in the log, and an answer if the code failed."""

import re
import secrets
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.gateway.gateway import Gateway
from conductor.gateway.openai_format import error_body
from conductor.gateway.request_body import ClientLeft

_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_QUIET = ("/livez", "/readyz")
CLIENT_LEFT = 499  # as proxies log it


class RequestLog:
    """`X-Request-Id` is taken from the client or minted, and sent back with every answer."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway = self._gateway
        request_id = _request_id(scope)
        began = gateway.clock.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientLeft:
            status = CLIENT_LEFT
        except Exception:
            gateway.log.exception("a bug in the gateway", request_id=request_id.decode())
            if not status:
                body = error_body("the gateway failed; its log says why", 500, "bug", None)
                await JSONResponse(body, 500)(scope, receive, send_with_id)
        finally:
            gateway.counts[f"status_{status}"] += 1
            if scope["path"] not in _QUIET:
                self._tell(scope, request_id.decode(), status, gateway.clock.monotonic() - began)

    def _tell(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        notes: dict[str, Any] = scope.get("podium.notes", {})
        self._gateway.log.info(
            f"{scope['method']} {scope['path']}",
            status=status,
            ms=round(seconds * 1000, 1),
            request_id=request_id,
            **notes,
        )


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return bytes(value)
    return f"req-{secrets.token_hex(12)}".encode()

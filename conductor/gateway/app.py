"""The ASGI application: routes and error answers."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from conductor.gateway import openai_format
from conductor.gateway.chat import ChatEndpoint
from conductor.gateway.gateway import Gateway
from conductor.gateway.health import Health
from conductor.gateway.request_log import RequestLog
from protocol.errors import PodiumError, UnknownModel


def make_app(gateway: Gateway, health: Health) -> Starlette:
    async def models(request: Request) -> Response:
        data = [openai_format.model(m, gateway.created) for m in gateway.config.models]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in gateway.config.models:
            raise UnknownModel(f"no model {name!r}")
        return JSONResponse(openai_format.model(name, gateway.created))

    async def livez(request: Request) -> Response:
        return _probe(*health.live())

    async def readyz(request: Request) -> Response:
        if gateway.draining:
            return _probe(False, {"status": "unavailable", "reason": "the gateway is draining"})
        if gateway.client is None or not gateway.client.connected:
            reason = "the gateway has no session with the conductor"
            return _probe(False, {"status": "unavailable", "reason": reason})
        return _probe(*health.ready())

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name}", model),
            Route("/v1/chat/completions", ChatEndpoint(gateway), methods=["POST"]),
            Route("/livez", livez),
            Route("/readyz", readyz),
        ],
        middleware=[Middleware(RequestLog, gateway=gateway)],
        exception_handlers={PodiumError: _failed, HTTPException: _refused},
    )


def _probe(ok: bool, body: dict[str, Any]) -> Response:
    return JSONResponse(body, 200 if ok else 503)


def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, PodiumError)
    after = openai_format.retry_after(error)
    headers = {} if after is None else {"retry-after": str(after)}
    if error.status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(openai_format.describe(error), error.status, headers)


def _refused(request: Request, error: Exception) -> Response:
    """What the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = openai_format.error_body(text, error.status_code, code, None)
    return JSONResponse(body, error.status_code, error.headers)

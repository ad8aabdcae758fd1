"""What is answered: OpenAI's objects as plain data, errors included."""

import math
from typing import Any

from protocol.errors import PodiumError
from protocol.messages import Reason

_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}


def error_body(message: str, status: int, code: str | None, param: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: PodiumError) -> dict[str, Any]:
    param = error.detail.get("param")
    if error.code == "unknown_model":
        param = "model"
    return error_body(
        error.message, error.status, error.code, param if isinstance(param, str) else None
    )


def retry_after(error: PodiumError) -> int | None:
    """Whole seconds, for whoever may try again."""
    value = error.detail.get("retry_after")
    if isinstance(value, int | float) and math.isfinite(value):
        return max(1, math.ceil(value))
    return 1 if error.status in (429, 503) and error.retryable else None


def finish_reason(reason: Reason) -> str:
    return "length" if reason is Reason.LENGTH else "stop"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class ChatAnswer:
    """The objects of one answer: whole, or as the chunks of a stream.

    `include_usage`: a stream's chunks have a `usage`, which is null in all but the last.
    """

    def __init__(
        self, answer_id: str, model: str, created: int, include_usage: bool = False
    ) -> None:
        self._head = {"id": answer_id, "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def whole(self, text: str, reason: Reason, used: dict[str, int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {
            "index": 0, "message": message, "logprobs": None,
            "finish_reason": finish_reason(reason),
        }  # fmt: skip
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": used}

    def chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {
            **self._head, "object": "chat.completion.chunk", "choices": [choice], **self._tail,
        }  # fmt: skip

    def usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": used}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "podium"}

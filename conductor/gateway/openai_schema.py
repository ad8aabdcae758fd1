"""What `POST /v1/chat/completions` takes: the OpenAI fields that mean something here.

Wrong values are refused by field; fields that are not listed are ignored, and told to the caller
of `parse` so that they can be counted.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protocol.errors import InvalidRequest

_U32 = (1 << 32) - 1
MAX_STOP = 1000  # characters of one stop string


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        """Text, or a list of text parts, which are joined by line breaks; null is no text."""
        if value is None:
            return ""
        if not isinstance(value, list):
            return value
        texts: list[str] = []
        for i, part in enumerate(value):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise ValueError(f"part {i}: an object with a type is expected")
            if part["type"] != "text":
                raise ValueError(f"part {i}: type {part['type']!r}: only 'text' is supported")
            if not isinstance(part.get("text"), str):
                raise ValueError(f"part {i}: text: a string is expected")
            texts.append(part["text"])
        return "\n".join(texts)

    def for_template(self) -> dict[str, Any]:
        """Templates know no `developer`; it is what `system` was called later."""
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": self.content}


class StreamOptions(_Fields):
    include_usage: bool | None = None


Token = Annotated[int, Field(ge=0, le=_U32)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class ChatRequest(_Fields):
    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_U32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_U32)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_U32)] | None = None
    """0 and -1 are off."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, le=_U32)]], Field(max_length=1024)
    ] | (None) = None
    ignore_eos: bool | None = None

    @field_validator("n")
    @classmethod
    def _one(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise ValueError("only one choice is supported (n: 1)")
        return n

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise ValueError("a string, or a list of strings, is expected")
        if len(stops) > 4:
            raise ValueError(f"at most 4 stop strings are taken, got {len(stops)}")
        if any(not 1 <= len(s) <= MAX_STOP for s in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP} characters")
        return stops

    @property
    def stops(self) -> list[str]:
        """The validator leaves a list, whatever came."""
        return list(self.stop or [])

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def parse(body: Any) -> tuple[ChatRequest, list[str]]:
    """The request, and the names of fields that were ignored.

    Raises `InvalidRequest`, whose detail names the field (`param`).
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as e:
        problem = e.errors(include_url=False, include_input=False, include_context=False)[0]
        path = ".".join(str(p) for p in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{path}: {text}", param=path) from None
    return request, sorted(request.model_extra or {})

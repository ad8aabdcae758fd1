"""Chat templates: Jinja text that came with the weights, so it runs in a sandbox.

The environment (block trimming, `raise_exception`, `strftime_now`, `tojson`, loop controls, the
`generation` block) is what published templates are written for.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import ConfigError, InvalidRequest


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """`variables`: special tokens by name (`bos_token`, …), as the template may print them."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises `ConfigError` if `source` is not valid Jinja."""
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as e:
            raise ConfigError(f"the model's chat template is not valid Jinja: {e}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next turn.

        Raises `InvalidRequest` where the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], tools=None, documents=None,
                add_generation_prompt=True, **self._variables,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {e}", param="messages"
            ) from None

"""A child's log line, read back: its level and its fields survive the pipe.

Children write `[level] text`, or one JSON object a line (`log.format: json`). Whatever else comes,
such as a traceback or a library's own words, is text at `info`.
"""

import json
import re
from typing import Any

_LEVELS = {"debug", "info", "warning", "error", "critical"}
_LINE = re.compile(r"\[(\w+)\s*\] (.*)", re.DOTALL)


def read(line: str) -> tuple[str, str, dict[str, Any]]:
    """(level, text, fields). Fields that the reader's own line has are left out."""
    if line.startswith("{"):
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if isinstance(said, dict) and isinstance(said.get("event"), str):
            level = str(said.pop("level", "info"))
            text = said.pop("event")
            said.pop("timestamp", None)
            fields = {f"{k}_" if k == "child" else str(k): v for k, v in said.items()}
            return level if level in _LEVELS else "info", text, fields
    found = _LINE.match(line)
    if found and found[1].lower() in _LEVELS:
        return found[1].lower(), found[2].strip(), {}
    return "info", line, {}

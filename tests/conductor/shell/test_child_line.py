"""A child's level and fields survive the pipe to the conductor's log."""

import pytest

from conductor.shell.child_line import read


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("[ERROR] it broke: [x] y", ("error", "it broke: [x] y", {})),
        ("[info     ] serving at http://x", ("info", "serving at http://x", {})),
        ("[rank0] says a library", ("info", "[rank0] says a library", {})),
        ("Traceback (most recent call last):", ("info", "Traceback (most recent call last):", {})),
        ("{not json", ("info", "{not json", {})),
        ('{"event": 3}', ("info", '{"event": 3}', {})),
        (
            '{"event": "POST", "level": "warning", "timestamp": "t", "status": 500, "child": 1}',
            ("warning", "POST", {"status": 500, "child_": 1}),
        ),
        ('{"event": "x", "level": "loud"}', ("info", "x", {})),
    ],
)
def test_lines(line: str, want: tuple[str, str, dict[str, object]]) -> None:
    assert read(line) == want

"""Lines come out whole, however the bytes arrive, and never longer than the bound."""

from hypothesis import given
from hypothesis import strategies as st

from conductor.shell.line_splitter import LineSplitter


def test_lines_are_whole_and_the_last_may_lack_its_end() -> None:
    s = LineSplitter()
    assert s.feed(b"one\ntw") == ["one"]
    assert s.feed(b"o\n\n  \nthree\rfour") == ["two", "three"]
    assert s.finish() == ["four"]
    assert s.finish() == []


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert LineSplitter().feed(b"\xff!\n") == ["\N{REPLACEMENT CHARACTER}!"]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_no_line_exceeds_the_bound_and_nothing_is_lost(chunks: list[bytes]) -> None:
    s = LineSplitter(limit=8)
    lines = [line for c in chunks for line in s.feed(c)] + s.finish()
    assert all(len(line) <= 8 for line in lines)
    text = b"".join(chunks).decode("latin-1")
    kept = [c for c in "".join(lines) if c.isalnum() and c.isascii()]
    assert kept == [c for c in text if c.isalnum() and c.isascii()]

"""Which lines are quoted when a child has ended."""

from conductor.shell.last_words import LINES, LastWords


def test_the_last_lines_are_kept() -> None:
    words = LastWords()
    for i in range(3):
        words.add(str(i))
    assert words.lines() == ["0", "1", "2"]
    for i in range(3, 100):
        words.add(str(i))
    assert words.lines() == [str(i) for i in range(70, 100)]


def test_a_crash_report_is_kept_from_its_top() -> None:
    words = LastWords()
    for i in range(100):
        words.add(f"before {i}")
    words.add("Fatal Python error: Segmentation fault")
    words.add("  File one")
    assert words.lines()[-3:] == [
        "before 99", "Fatal Python error: Segmentation fault", "  File one",
    ]  # fmt: skip
    assert len(words.lines()) == LINES
    for i in range(100):
        words.add(f"  File {i}")
    assert len(words.lines()) == LINES
    assert words.lines()[0] == "Fatal Python error: Segmentation fault"

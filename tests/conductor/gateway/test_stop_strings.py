from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.stop_strings import StopStrings


def cut(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    s = StopStrings(stops)
    text = "".join(s.push(p) for p in pieces) + s.finish()
    return text, s.stopped


def test_text_up_to_the_stop_and_nothing_after() -> None:
    assert cut(["END"], ["abcEND", "def"]) == ("abc", True)
    assert cut(["END"], ["abc"]) == ("abc", False)
    assert cut([], ["abc"]) == ("abc", False)


def test_a_stop_that_straddles_pieces_is_never_shown() -> None:
    s = StopStrings(["\n\nUser:"])
    assert [s.push(p) for p in ("hi", "\n", "\nUs", "er", ": x")] == ["hi", "", "", "", ""]
    assert s.stopped
    assert s.finish() == ""


def test_what_is_held_back_comes_out_when_it_becomes_no_stop() -> None:
    s = StopStrings(["aab"])
    assert s.push("aa") == ""
    assert s.push("a") == "a"  # 'aa' may still begin the stop
    assert s.push("x") == "aax"
    assert s.push("a") == ""
    assert s.finish() == "a"
    assert not s.stopped


def test_the_stop_that_is_complete_first_counts() -> None:
    assert cut(["bcd", "c"], ["abcd"]) == ("ab", True)
    assert cut(["bc", "abc"], ["xabc"]) == ("x", True)


ALPHABET = st.text("ab", max_size=12)


@given(ALPHABET, st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.data())
@settings(max_examples=500, deadline=None)
def test_the_result_does_not_depend_on_the_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, stopped = cut(stops, pieces)
    assert (shown, stopped) == cut(stops, [text])
    assert text.startswith(shown)
    assert not any(s in shown for s in stops)
    assert stopped == any(s in text for s in stops)


@given(st.lists(ALPHABET, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_a_stop_needs(pieces: list[str], stops: list[str]) -> None:
    s = StopStrings(stops)
    given_, shown = 0, 0
    for p in pieces:
        given_ += len(p)
        shown += len(s.push(p))
        if s.stopped:
            return
        assert given_ - shown < max(map(len, stops))

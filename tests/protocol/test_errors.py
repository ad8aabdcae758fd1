"""Errors: each says whose fault it was, and crosses the wire as itself."""

import pytest

from protocol import errors


def kinds() -> list[type[errors.PodiumError]]:
    found = [errors.PodiumError]
    for k in found:
        found += k.__subclasses__()
    return [k for k in found if k.__module__ == errors.__name__]


def test_codes_are_unique() -> None:
    codes = [k.code for k in kinds()]
    assert len(codes) == len(set(codes))


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    doc = errors.__doc__ or ""
    for k in kinds():
        assert k.__name__ in doc, k
    for line in doc.splitlines():
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        if len(words) >= 4 and words[2].isdigit():
            k = getattr(errors, words[0])
            assert (k.code, str(k.status), k.fault) == tuple(words[1:4])


def test_an_error_crosses_the_wire() -> None:
    e = errors.from_wire(errors.Overloaded("queue full", retry_after=2).to_wire())
    assert type(e) is errors.Overloaded
    assert (e.message, e.detail, e.status) == ("queue full", {"retry_after": 2}, 429)
    assert type(errors.from_wire({"code": "from the future", "message": "x"})) is errors.PodiumError


def test_an_illegal_transition_brings_its_story() -> None:
    e = errors.IllegalTransition("row 7", "held", "moved", ["waiting -run-> running"])
    assert str(e) == "row 7: no transition from held on moved:\n  waiting -run-> running"
    with pytest.raises(errors.Bug):
        raise errors.from_wire(e.to_wire())

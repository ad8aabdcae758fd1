"""Whom a death charges, by how the process ended."""

import signal

import pytest

from conductor.shell.deaths import classify


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_from_outside_charge_nobody(number: signal.Signals) -> None:
    death = classify(-number)
    assert (death.outside, death.config, death.why) == (True, False, f"ended by {number.name}")


@pytest.mark.parametrize(
    "number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE]
)
def test_crashes_come_from_inside(number: signal.Signals) -> None:
    assert classify(-number).outside is False


def test_a_hang_that_we_ended_is_the_steps_own_doing() -> None:
    death = classify(-signal.SIGKILL, killed_for="a step has run for 9 s")
    assert (death.outside, death.why) == (False, "killed: a step has run for 9 s")


def test_statuses() -> None:
    assert classify(1).outside is False
    assert classify(0).outside is True
    assert [classify(s).config for s in (0, 1, 77, 78)] == [False, False, False, True]
    assert classify(-64).why == "ended by SIGRTMAX"
    assert "signal 50" in classify(-50).why

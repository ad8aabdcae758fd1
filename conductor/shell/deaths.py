"""Why a child ended, and whom that charges (rule 16 of docs/wire.md). Pure."""

import signal
from dataclasses import dataclass

from protocol.errors import EXIT_CONFIG

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True, slots=True)
class Death:
    """`outside`: nobody's step caused it, so no request is charged. `config`: never restarted."""

    outside: bool
    config: bool
    why: str


def classify(returncode: int, killed_for: str = "") -> Death:
    """`returncode` as `subprocess` gives it (negative: a signal). `killed_for`: why the conductor
    itself sent SIGKILL, or ''.

    A crash signal or a non-zero status came from what the process did; SIGKILL, SIGTERM, SIGINT and
    SIGHUP come from an operator, the kernel or the host. A hang that the conductor ended is the
    step's own doing. Status 0 unasked follows a signal that the child handled: from outside.
    """
    if killed_for:
        return Death(outside=False, config=False, why=f"killed: {killed_for}")
    if returncode < 0:
        number = -returncode
        name = signal.Signals(number).name if number in _KNOWN else f"signal {number}"
        return Death(outside=number in _FROM_OUTSIDE, config=False, why=f"ended by {name}")
    if returncode == EXIT_CONFIG:
        why = f"exit status {EXIT_CONFIG}: its configuration cannot be used"
        return Death(outside=False, config=True, why=why)
    return Death(outside=returncode == 0, config=False, why=f"exit status {returncode}")


_KNOWN = frozenset(int(s) for s in signal.Signals)

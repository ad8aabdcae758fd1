"""What probes are told: from a snapshot that a background task keeps fresh, so at once."""

import asyncio
from typing import Any

from protocol.client.stats import StatsReader
from protocol.clock import Clock
from protocol.errors import BadMessage, Unavailable
from protocol.stats import Snapshot

POLL_S = 0.5
WAITING_POLL_S = 0.05  # while not ready: whoever waits for it should not wait for us
FRESH_S = 2.0


class Health:
    """`live` speaks of the conductor's loop only; `ready` also of a warmed worker (P7)."""

    def __init__(self, reader: StatsReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._taken_at = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    snapshot = await self._reader.snapshot(FRESH_S)
                except (Unavailable, BadMessage):
                    pass
                else:
                    self._snapshot, self._taken_at = snapshot, self._clock.monotonic()
                await asyncio.sleep(POLL_S if self.ready()[0] else WAITING_POLL_S)
        finally:
            self._reader.close()

    def live(self) -> tuple[bool, dict[str, Any]]:
        if self._snapshot is None:
            return False, {"status": "unavailable", "reason": "no snapshot of the conductor yet"}
        age = self._clock.monotonic() - self._taken_at
        if age >= FRESH_S:
            text = f"the conductor's last snapshot is {age:.1f} s old"
            return False, {"status": "unavailable", "reason": text}
        return True, {"status": "ok"}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        live, body = self.live()
        if not live or self._snapshot is None:
            return False, body
        phase = self._snapshot["conductor"].get("phase")
        if phase != "ready":
            return False, {"status": "unavailable", "reason": f"the daemon is {phase}"}
        if not self._snapshot["machine"].get("ready"):
            return False, {"status": "unavailable", "reason": "no worker is ready"}
        return True, {"status": "ok"}

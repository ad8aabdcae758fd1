"""What the core decided, done: one method per command."""

from collections.abc import Callable

import structlog

from conductor.core.commands import Command, Drained, Forget, Kill, Note, Send
from conductor.shell.links import Links
from conductor.shell.supervisor import Supervisor
from protocol import faults
from protocol.messages import Welcome

_EXECUTE = faults.point("conductor.execute")


class Executor:
    """`welcomed(life)` is told of each peer that the core took in, `owner_lost(life)` of each owner
    that it gave up, `drained()` of a drain's end."""

    def __init__(
        self,
        links: Links,
        supervisor: Supervisor,
        log: structlog.typing.FilteringBoundLogger,
        *,
        welcomed: Callable[[int], None],
        owner_lost: Callable[[int], None],
        drained: Callable[[], None],
    ) -> None:
        self._links = links
        self._supervisor = supervisor
        self._log = log
        self._welcomed = welcomed
        self._owner_lost = owner_lost
        self._drained = drained

    def perform(self, command: Command) -> None:
        if _EXECUTE.act is not None:
            _EXECUTE.act()
        match command:
            case Send():
                self.send(command)
            case Forget():
                self.forget(command)
            case Kill():
                self.kill(command)
            case Note():
                self.note(command)
            case Drained():
                self.drained(command)

    def send(self, command: Send) -> None:
        sent = self._links.send(command.life, command.message)
        if sent and isinstance(command.message, Welcome):
            self._welcomed(command.life)

    def forget(self, command: Forget) -> None:
        self._links.forget(command.life)
        if command.owner_lost:
            self._owner_lost(command.life)

    def kill(self, command: Kill) -> None:
        if not self._supervisor.kill(command.life, command.why):
            # Somebody else's process, or one that has just ended: the core has fenced its life.
            self._log.info("not our process to kill", life=f"{command.life:#x}", why=command.why)

    def note(self, command: Note) -> None:
        write = getattr(self._log, command.level, self._log.info)
        detail = {"what" if k == "event" else k: v for k, v in command.detail}
        write(command.text, **detail)

    def drained(self, command: Drained) -> None:
        self._drained()

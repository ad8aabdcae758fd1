"""systemd's notification protocol (sd_notify(3)), spoken only where a socket was given."""

import socket
from contextlib import suppress


class ServiceManager:
    """Datagrams to `notify_socket` ('' : every call does nothing). Never blocks, never raises.

    `watchdog_s`: the service manager kills this process when it is silent for that long; 0 is off.
    """

    def __init__(self, notify_socket: str = "", watchdog_s: float = 0.0) -> None:
        self._address = notify_socket
        self.watchdog_s = watchdog_s if notify_socket else 0.0
        self._socket: socket.socket | None = None
        if notify_socket:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            if notify_socket.startswith("@"):  # Linux's abstract namespace
                self._address = "\0" + notify_socket[1:]

    def _say(self, text: str) -> None:
        if self._socket is not None:
            with suppress(OSError):  # a full or vanished socket must not stop the daemon
                self._socket.sendto(text.encode(), self._address)

    def status(self, text: str) -> None:
        self._say(f"STATUS={text}")

    def loading(self, seconds: float) -> None:
        """Start-up goes on: do not give up for `seconds` more."""
        self._say(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def ready(self, text: str) -> None:
        self._say(f"READY=1\nSTATUS={text}")

    def stopping(self, text: str) -> None:
        self._say(f"STOPPING=1\nSTATUS={text}")

    def alive(self) -> None:
        if self.watchdog_s:
            self._say("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

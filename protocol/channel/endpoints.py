"""Every address of a deployment, in one place."""

from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

_MAX_IPC_PATH = 107  # bytes of sockaddr_un.sun_path, less its final zero


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Unix-socket addresses below one private runtime directory."""

    root: Path

    def _ipc(self, name: str) -> str:
        path = str(self.root / name)
        if len(path.encode()) > _MAX_IPC_PATH:
            raise ConfigError(
                f"runtime_dir: {path!r} is {len(path.encode())} bytes; a Unix socket's path may "
                f"have {_MAX_IPC_PATH}: choose a shorter runtime_dir"
            )
        return f"ipc://{path}"

    @property
    def control(self) -> str:
        """The conductor's ROUTER: workers and owners connect."""
        return self._ipc("control.sock")

    @property
    def stats(self) -> str:
        """The conductor's snapshot socket."""
        return self._ipc("stats.sock")

    def stream(self, life: int) -> str:
        """An owner's ROUTER: workers connect."""
        return self._ipc(self.stream_path(life).name)

    def stream_path(self, life: int) -> Path:
        """The file of `stream`'s socket."""
        return self.root / f"s{life:016x}.sock"

    @property
    def lock(self) -> Path:
        """Held by the daemon; contains its pid."""
        return self.root / "lock"

    @property
    def config(self) -> Path:
        """The resolved configuration that children read."""
        return self.root / "config.json"

    @property
    def gateway(self) -> Path:
        """The gateway writes its base URL here once it listens."""
        return self.root / "gateway.url"

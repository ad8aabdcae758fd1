"""The gateway process: its socket, its client, its signals, its end.

Order of a start: listen (probes and 503s are answered from here on), load tokenizers, connect to
the conductor. SIGTERM drains: what is new gets 503, open streams finish within
`supervision.drain_s`; a second signal aborts them.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Generator

import structlog
import uvicorn

from conductor.gateway.app import make_app
from conductor.gateway.gateway import Gateway
from conductor.gateway.health import Health
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.client.async_client import AsyncClient
from protocol.client.stats import StatsReader
from protocol.config import DaemonConfig, GatewayConfig
from protocol.errors import EXIT_CONFIG, ConfigError, PodiumError
from protocol.parent import at_end

EXIT_FAILED = 1
BACKLOG = 1024


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: when to end is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(config: GatewayConfig) -> socket.socket:
    """A listening address; port 0 takes a free one. Raises `ConfigError` for an address that this
    machine does not have, `OSError` for one that is taken."""
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as e:
        raise ConfigError(f"gateway.host {config.host!r}: {e}") from None
    family, kind, number, _, address = found[0]
    s = socket.socket(family, kind, number)
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(address)
    except BaseException:
        s.close()
        raise
    return s


def base_url(s: socket.socket) -> str:
    """How this machine reaches the socket."""
    host, port = s.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class GatewayProcess:
    def __init__(
        self,
        config: DaemonConfig,
        endpoints: Endpoints,
        life: int,
        death_fd: int | None,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._endpoints = endpoints
        self._life = life
        self._death_fd = death_fd
        self._log = log

    async def run(self) -> int:
        """Until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._abort = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        if self._death_fd is not None:
            loop.add_reader(self._death_fd, self._watch_parent, self._death_fd)
        try:
            listening = bind(self._config.gateway or GatewayConfig())
        except ConfigError as e:
            self._log.error(f"configuration: {e.message}")
            return EXIT_CONFIG
        except OSError as e:
            self._log.error(f"cannot listen: {e}")
            return EXIT_FAILED
        gateway = Gateway(self._config, self._log)
        network = ZmqNetwork()
        health = Health(StatsReader(self._endpoints, network), gateway.clock)
        polling = asyncio.ensure_future(health.run())
        server = _Server(self._uvicorn(gateway, health))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            return await self._until_told(gateway, network, listening, serving)
        finally:
            self._endpoints.gateway.unlink(missing_ok=True)
            server.force_exit = self._abort.is_set()
            server.should_exit = True
            await serving
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
            gateway.close()
            network.close()

    async def _until_told(
        self,
        gateway: Gateway,
        network: ZmqNetwork,
        listening: socket.socket,
        serving: "asyncio.Future[None]",
    ) -> int:
        """Start, serve, drain."""
        url = base_url(listening)
        self._write_url(url)
        stop = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._start(gateway, network))
        try:
            await asyncio.wait({stop, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0  # told to stop before it ever served
            client = starting.result()
            self._log.info(f"serving at {url}")
            failed = asyncio.ensure_future(client.until_failed())
            await asyncio.wait({stop, failed, serving}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():  # fenced: only a new life may come back
                self._log.error(f"the conductor gave this gateway up: {failed.result().message}")
                return EXIT_FAILED
            failed.cancel()
            return await self._drain(gateway)
        except ConfigError as e:
            self._log.error(f"configuration: {e.message}")
            return EXIT_CONFIG
        except PodiumError as e:
            self._log.error(f"cannot start: {e.message}")
            return EXIT_FAILED
        finally:
            for task in (stop, starting):
                task.cancel()

    async def _start(self, gateway: Gateway, network: ZmqNetwork) -> AsyncClient:
        await gateway.load()
        client = AsyncClient(
            self._endpoints, network, role="gateway", name="gateway", life=self._life
        )
        await client.connect(self._config.supervision.start_timeout_s)
        gateway.client = client
        return client

    async def _drain(self, gateway: Gateway) -> int:
        seconds = self._config.supervision.drain_s
        self._log.info(f"draining for at most {seconds} s", **gateway.statistics())
        draining = asyncio.ensure_future(gateway.drain(seconds))
        aborting = asyncio.ensure_future(self._abort.wait())
        await asyncio.wait({draining, aborting}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        aborting.cancel()
        if self._abort.is_set():
            gateway.abort()
            return EXIT_FAILED
        return 0

    def _uvicorn(self, gateway: Gateway, health: Health) -> uvicorn.Config:
        return uvicorn.Config(
            make_app(gateway, health),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )

    def _write_url(self, url: str) -> None:
        """In one step, so that nobody reads half of it."""
        path = self._endpoints.gateway
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(url, encoding="utf-8")
        new.replace(path)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._abort.set()
        self._stop.set()

    def _watch_parent(self, fd: int) -> None:
        if at_end(fd):
            asyncio.get_running_loop().remove_reader(fd)
            self._parent_died()

    def _parent_died(self) -> None:
        self._log.error("the conductor is gone")
        with contextlib.suppress(OSError):
            self._endpoints.gateway.unlink(missing_ok=True)
        os._exit(EXIT_FAILED)

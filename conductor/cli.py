"""The `podium` command. The environment is read here, and goes on as values."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import cyclopts
import uvloop
from cyclopts import Parameter

from conductor.observe.render import render
from conductor.observe.stats_socket import read_snapshot
from conductor.shell import exit_codes
from conductor.shell.app import Daemon
from conductor.shell.console import Console
from conductor.shell.log import LogWriter
from conductor.shell.resolve import cores, preflight, resolve, visible_gpus
from conductor.shell.runtime_dir import AlreadyRunning
from conductor.shell.service_manager import ServiceManager
from protocol import PROTOCOL_VERSION, __version__, faults
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.config import DaemonConfig, ModelConfig, load, runtime_dir
from protocol.errors import ConfigError, PodiumError, Unavailable

_STATS_S = 2.0
_STDERR = 2

app = cyclopts.App(
    name="podium",
    help="Serve PyTorch models that are more than one autoregressive loop.",
    help_epilogue=exit_codes.HELP,
    version=f"podium {__version__}, protocol {PROTOCOL_VERSION}",
    result_action="return_value",
)


@app.command
def serve(config: Path, /) -> int:
    """Run a deployment in the foreground until SIGTERM or SIGINT.

    The first signal drains: running streams may finish. A second one stops at once.

    Parameters
    ----------
    config
        A YAML file, as in configs/.
    """
    environment = dict(os.environ)
    try:
        resolved = _resolved(config, environment)
        preflight(resolved)
    except ConfigError as e:
        return _fail(e, exit_codes.CONFIG)
    faults.install(resolved.faults, "conductor")
    console = Console(resolved.log, LogWriter(_STDERR, os.isatty(_STDERR)))
    try:
        daemon = Daemon(resolved, environment, console, _service_manager(environment))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(daemon.run())
    except ConfigError as e:
        return _fail(e, exit_codes.CONFIG)
    except AlreadyRunning as e:
        return _fail(e, exit_codes.BUSY)
    finally:
        console.close()


@app.command
def check(config: Path, /) -> int:
    """Say what a configuration would run, or what is wrong with it. Starts nothing.

    Parameters
    ----------
    config
        A YAML file, as in configs/.
    """
    try:
        resolved = _resolved(config, os.environ)
        files = preflight(resolved)
    except ConfigError as e:
        return _fail(e, exit_codes.CONFIG)
    print(f"runtime directory  {runtime_dir(resolved)}")
    g = resolved.gateway
    print(f"gateway            {f'http://{g.host}:{g.port}' if g else 'none: ZeroMQ clients only'}")
    assert resolved.workers != "auto"
    for w in resolved.workers:
        models = ", ".join(w.models if w.models is not None else resolved.models)
        threads = f"{w.threads} thread" + ("s" if w.threads != 1 else "")
        print(f"worker             {w.name}: {w.device}, {threads}: {models}")
    for name, path in files.items():
        kind = resolved.models[name].kind
        print(f"model              {name}: {kind}" + (f", {path}" if path else ""))
    print("OK")
    return exit_codes.OK


@app.command
def stats(
    config: Path | None = None,
    /,
    *,
    runtime_directory: Annotated[Path | None, Parameter(name="--runtime-dir")] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show what a running daemon does now.

    Parameters
    ----------
    config
        The daemon's configuration file; without it, the default deployment.
    runtime_directory
        The daemon's runtime directory, in place of a configuration.
    as_json
        Print the whole snapshot as JSON.
    """
    try:
        if runtime_directory is not None:
            root = runtime_directory.expanduser().absolute()
        else:
            default = DaemonConfig(models={"-": ModelConfig()})
            root = runtime_dir(load(config) if config is not None else default)
        network = ZmqNetwork()
        try:
            snapshot = read_snapshot(network, Endpoints(root), _STATS_S)
        finally:
            network.close()
    except ConfigError as e:
        return _fail(e, exit_codes.CONFIG)
    except Unavailable as e:
        return _fail(e, exit_codes.UNAVAILABLE)
    print(json.dumps(snapshot, indent=1) if as_json else render(snapshot))
    return exit_codes.OK


@app.command
def version() -> int:
    """Print the version."""
    print(f"podium {__version__}, protocol {PROTOCOL_VERSION}")
    return exit_codes.OK


def main() -> None:
    try:
        status = app(sys.argv[1:], exit_on_error=False)
    except cyclopts.CycloptsError:  # already told
        status = exit_codes.USAGE
    sys.exit(status if isinstance(status, int) else exit_codes.OK)


def _resolved(path: Path, environment: Mapping[str, str]) -> DaemonConfig:
    return resolve(load(path), gpus=visible_gpus(environment), cores=cores())


def _service_manager(environment: Mapping[str, str]) -> ServiceManager:
    """systemd asks for pings by WATCHDOG_USEC, if WATCHDOG_PID is absent or ours."""
    usec = environment.get("WATCHDOG_USEC", "")
    ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog_s = int(usec) / 1e6 if usec.isdigit() and ours else 0.0
    return ServiceManager(environment.get("NOTIFY_SOCKET", ""), watchdog_s)


def _fail(error: PodiumError, status: int) -> int:
    print(f"podium: {error.message}", file=sys.stderr)
    return status

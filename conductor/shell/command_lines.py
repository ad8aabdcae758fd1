"""How the children are started: their command lines and their environment."""

import sys
from collections.abc import Mapping
from pathlib import Path

import protocol
from conductor.shell.supervisor import ChildSpec
from protocol.channel.endpoints import Endpoints
from protocol.config import DaemonConfig

GATEWAY = "gateway"
# Ours alone: a child that spoke to the service manager would speak for the daemon.
_KEPT_BACK = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS")


def child_specs(config: DaemonConfig, endpoints: Endpoints) -> list[ChildSpec]:
    """One per worker, in order, then the gateway. `config` is resolved."""
    assert config.workers != "auto"
    # -P: a file called worker.py where the daemon was started must not be run in its place.
    # faulthandler: a child that crashes says where, and its last words are quoted.
    python = [sys.executable, "-P", "-X", "faulthandler"]
    read = ["--config", str(endpoints.config)]

    def worker(name: str) -> ChildSpec:
        def argv(life: int, death_fd: int) -> list[str]:
            return [
                *python, "-m", "worker", *read, "--name", name, "--life", str(life),
                "--control", endpoints.control, "--death-fd", str(death_fd),
            ]  # fmt: skip

        return ChildSpec(name, "worker", argv)

    def gateway(life: int, death_fd: int) -> list[str]:
        return [
            *python, "-m", "conductor.gateway", *read, "--life", str(life),
            "--control-root", str(endpoints.root), "--death-fd", str(death_fd),
        ]  # fmt: skip

    specs = [worker(w.name) for w in config.workers]
    if config.gateway is not None:
        specs.append(ChildSpec(GATEWAY, "gateway", gateway))
    return specs


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The daemon's environment without what is meant for it alone; a child imports the same code
    as the daemon, a checkout that is not installed too."""
    result = {k: v for k, v in environment.items() if k not in _KEPT_BACK}
    root = Path(protocol.__file__).parents[1]
    if not {"site-packages", "dist-packages"} & set(root.parts):
        before = result.get("PYTHONPATH")
        result["PYTHONPATH"] = f"{root}:{before}" if before else str(root)
    return result

"""`podium serve` with fake children: everything of the shell is real, nothing needs torch.

python fake_deployment.py CONFIG WORKER_MODE [GATEWAY_MODE]
"""

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from conductor.shell.app import Daemon
from conductor.shell.console import Console
from conductor.shell.log import LogWriter
from conductor.shell.resolve import resolve
from conductor.shell.runtime_dir import AlreadyRunning
from conductor.shell.service_manager import ServiceManager
from conductor.shell.supervisor import ChildSpec, Role
from protocol.config import load

CHILD = Path(__file__).with_name("fake_child.py")


def spec(name: str, role: Role, root: str, mode: str) -> ChildSpec:
    def argv(life: int, death_fd: int) -> list[str]:
        return [sys.executable, str(CHILD), role, name, str(life), str(death_fd), root, mode]

    return ChildSpec(name, role, argv)


def main() -> int:
    path, mode = sys.argv[1:3]
    gateway = sys.argv[3] if len(sys.argv) > 3 else "good"
    config = resolve(load(path), gpus=0, cores=2)
    assert config.workers != "auto"
    assert config.runtime_dir is not None
    specs = [spec(w.name, "worker", config.runtime_dir, mode) for w in config.workers]
    specs.append(spec("gateway", "gateway", config.runtime_dir, gateway))
    console = Console(config.log, LogWriter(2, False))
    service = ServiceManager(os.environ.get("NOTIFY_SOCKET", ""), 10.0)
    daemon = Daemon(config, dict(os.environ), console, service, specs)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(daemon.run())
    except AlreadyRunning as e:
        print(e.message, file=sys.stderr)
        return 75
    finally:
        console.close()


if __name__ == "__main__":
    sys.exit(main())

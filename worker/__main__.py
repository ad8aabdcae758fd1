"""`python -m worker`: one worker process. Started by the conductor's supervisor.

Order matters: the process is tied to its parent before anything heavy is imported, so that a parent
that dies during a slow import leaves nothing behind.
"""

import argparse
import signal
import sys

from protocol.parent import ParentGone, tie_to_parent
from worker.process import exit_status


def _life(text: str) -> int:
    life = int(text, 0)
    if not 0 < life < 1 << 64:
        raise ValueError("a life is a non-zero 64-bit number")
    return life


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m worker",
        description="One Podium worker: a device and the models on it.",
        epilog=exit_status.HELP,
    )
    parser.add_argument("--config", required=True, help="the resolved configuration (JSON)")
    parser.add_argument("--name", required=True, help="this worker's name in the configuration")
    parser.add_argument("--life", required=True, type=_life, help="this incarnation's number")
    parser.add_argument("--control", required=True, help="the conductor's control address")
    parser.add_argument("--death-fd", type=int, help="read end of the parent's death pipe")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    return parser.parse_args()


def main() -> int:
    # A terminal's Ctrl-C reaches the whole group; the conductor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = _arguments()
    try:
        tie_to_parent(arguments.death_fd)
    except ParentGone as e:
        print(f"worker {arguments.name}: {e}", file=sys.stderr)
        return exit_status.OK
    except OSError as e:
        print(f"worker {arguments.name}: --death-fd: {e}", file=sys.stderr)
        return exit_status.USAGE

    from worker.process.app import run

    return run(
        config_path=arguments.config,
        name=arguments.name,
        life=arguments.life,
        control=arguments.control,
        death_fd=arguments.death_fd,
        log_level=arguments.log_level,
    )


if __name__ == "__main__":
    sys.exit(main())

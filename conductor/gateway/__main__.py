"""`python -m conductor.gateway`: started by the conductor, and not meant to be by hand."""

import argparse
import sys
from pathlib import Path

from protocol.parent import ParentGone, tie_to_parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="conductor.gateway")
    parser.add_argument("--config", required=True, help="the resolved configuration")
    parser.add_argument("--life", required=True, type=int)
    parser.add_argument("--control-root", required=True, help="the runtime directory")
    parser.add_argument("--death-fd", type=int, help="a pipe that closes when the conductor ends")
    args = parser.parse_args()
    try:
        tie_to_parent(args.death_fd)  # before anything heavy is imported
    except ParentGone as e:
        print(f"gateway: {e}", file=sys.stderr)
        return 0

    import uvloop

    from conductor.gateway.logs import forward_standard_logging, make_log
    from conductor.gateway.server import GatewayProcess
    from protocol import faults
    from protocol.channel.endpoints import Endpoints
    from protocol.config import LogConfig, load
    from protocol.errors import EXIT_CONFIG, ConfigError

    try:
        config = load(args.config)
    except ConfigError as e:
        make_log(LogConfig()).error(f"configuration: {e.message}")
        return EXIT_CONFIG
    faults.install(config.faults, "gateway")
    log = make_log(config.log)
    forward_standard_logging(log)
    process = GatewayProcess(
        config, Endpoints(Path(args.control_root)), args.life, args.death_fd, log
    )
    return uvloop.run(process.run())


if __name__ == "__main__":
    sys.exit(main())

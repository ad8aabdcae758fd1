"""Start the daemon, stream one answer to the terminal, say how fast it was, and leave.

Called by scripts/quickstart, which has made the environment. Exit status: 0 answered, 1 the daemon
or the answer failed, 130 interrupted.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from protocol import config as configuration
from protocol.channel.endpoints import Endpoints
from protocol.client.stats import fetch_stats
from protocol.errors import PodiumError

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / ".podium" / "quickstart.log"
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 15


class Failed(Exception):
    """What went wrong, in words for the terminal."""


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def usable_config(path: Path, scratch: Path) -> Path:
    """The configuration itself, or a copy on a free port where its port is taken."""
    c = configuration.load(path)
    if c.gateway is None:
        raise Failed(f"{path} has no gateway; the quickstart asks over HTTP")
    if c.gateway.port == 0 or port_is_free(c.gateway.host, c.gateway.port):
        return path
    print(f"Port {c.gateway.port} is taken; using a free one.", file=sys.stderr)
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["gateway"] = {**(data.get("gateway") or {}), "port": 0}
    copy = scratch / path.name
    copy.write_text(yaml.safe_dump(data), encoding="utf-8")
    return copy


def snapshot(endpoints: Endpoints) -> dict[str, Any] | None:
    if not (endpoints.root / "stats.sock").exists():
        return None
    try:
        return dict(asyncio.run(fetch_stats(endpoints, timeout=2.0)))
    except (PodiumError, OSError, TimeoutError):
        return None


class Progress:
    """Shows what the daemon logs while it starts; on a terminal in one line that changes.

    The daemon writes to a file: it may be kept, and its log must not run into the answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._terminal = sys.stderr.isatty()

    def show(self) -> None:
        with self.path.open(encoding="utf-8", errors="replace") as f:
            f.seek(self._at)
            lines = f.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith("\n"):
                break  # the rest of it is still being written
            self._at += len(line.encode())
            text = line.split("] ", 1)[-1].strip()
            if self._terminal:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)
            else:
                print(text, file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def tail(self) -> str:
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-15:])


def wait_ready(
    endpoints: Endpoints, daemon: "subprocess.Popen[bytes] | None", progress: Progress
) -> str:
    """The gateway's base URL, once a worker is ready to answer."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if daemon is not None:
            progress.show()
            if daemon.poll() is not None:
                raise Failed(
                    f"the daemon ended with status {daemon.returncode} before it was ready; its "
                    f"log, {progress.path}, ends:\n{progress.tail()}"
                )
        s = snapshot(endpoints)
        if s and s["machine"]["ready"] and s["gateway_url"]:
            return str(s["gateway_url"])
        time.sleep(0.1)
    raise Failed(f"the daemon was not ready after {START_TIMEOUT_S} s")


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            for raw in response:
                line = raw.decode().strip()
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as e:
        raise Failed(
            f"the gateway answered {e.code}: {e.read().decode(errors='replace')}"
        ) from None
    except urllib.error.URLError as e:
        raise Failed(f"the gateway at {url} cannot be reached: {e.reason}") from None


def ask(url: str, model: str, question: str) -> None:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    print(f"\n> {question}\n", flush=True)
    asked = time.monotonic()
    first = last = None
    tokens = 0
    for event in events(url, body):
        if "error" in event:
            raise Failed(f"the answer failed: {event['error'].get('message')}")
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            text = choice["delta"].get("content")
            if text:
                last = time.monotonic()
                first = first or last
                print(text, end="", flush=True)
    if first is None or last is None:
        raise Failed("the answer was empty")
    spent = time.monotonic() - asked
    rate = f"{(tokens - 1) / (last - first):.1f} tokens/s" if last > first and tokens > 1 else ""
    print(
        f"\n\n{tokens} tokens in {spent:.2f} s: first after {first - asked:.2f} s"
        + (f", then {rate}" if rate else "")
    )


def curl_line(url: str, model: str) -> str:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    )
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def stop(daemon: "subprocess.Popen[bytes]") -> None:
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def run(args: argparse.Namespace, scratch: Path) -> None:
    c = configuration.load(args.config)
    endpoints = Endpoints(configuration.runtime_dir(c))
    daemon: subprocess.Popen[bytes] | None = None
    LOG.parent.mkdir(exist_ok=True)
    progress = Progress(LOG)
    if snapshot(endpoints) is None:
        path = usable_config(args.config, scratch)
        command = [sys.executable, "-m", "conductor", "serve", str(path)]
        # A daemon that is kept must survive this terminal; one that is not must not outlive us.
        with progress.path.open("wb") as log:
            daemon = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, start_new_session=args.keep
            )
    else:
        print("A daemon is already running; asking it.", file=sys.stderr)
    keep = daemon is None or args.keep
    try:
        url = wait_ready(endpoints, daemon, progress)
        progress.done()
        model = args.model or next(iter(c.models))
        ask(url, model, args.question)
        if keep:
            print(f"\nIt is still up. Next, try:\n\n  {curl_line(url, model)}\n")
            if daemon is not None:
                print(f"Its log is {LOG.relative_to(ROOT)}; stop it with: kill {daemon.pid}")
        else:
            print(
                "\nNothing is left running. With `scripts/quickstart --keep` it stays up; "
                f"then try:\n\n  {curl_line(url, model)}\n"
            )
    except BaseException:
        keep = daemon is None
        raise
    finally:
        if daemon is not None and not keep:
            stop(daemon)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the daemon running")
    parser.add_argument("--question", default="What is the capital of France?")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--model", help="default: the configuration's first")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="podium-") as scratch:
            run(args, Path(scratch))
    except (Failed, PodiumError) as e:
        print(f"quickstart: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

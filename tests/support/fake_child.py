"""A worker or gateway of a few lines, without torch or HTTP: what supervision is tested with.

    python fake_child.py ROLE NAME LIFE DEATH_FD RUNTIME_DIR MODE

MODE: `good`; `stubborn` (ignores Exit and SIGTERM); `crash` (exits 3 once it was welcomed);
`fail` (exits 3 before its Hello); `config` (exits 78); `slow` (never says Hello).
"""

import os
import signal
import sys
from pathlib import Path

import zmq

from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.codec import decode
from protocol.graph import GraphSpec, Loop, ModelSpec, Step, Walk, spec_to_wire
from protocol.messages import Beat, Bye, Exit, Hello, Welcome
from protocol.session import Session

GRAPH = GraphSpec(
    nodes=("decoder",),
    walks=(
        Walk("prefill", Step("decoder"), then="decode"),
        Walk("decode", Loop("decode", Step("decoder"))),
    ),
    entry="prefill",
)
SPEC = ModelSpec("reference", GRAPH, context=4096, vocab=257, pages=64, page_tokens=16)


def main() -> int:
    role, name, life, death_fd, root, mode = sys.argv[1:]
    if mode in ("fail", "config"):
        print(f"{name} cannot start: mode {mode}", file=sys.stderr)
        return {"fail": 3, "config": 78}[mode]
    stubborn = mode == "stubborn"
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    endpoints = Endpoints(Path(root))
    network = ZmqNetwork()
    control = network.connect(endpoints.control)
    session = Session()
    poller = zmq.Poller()
    poller.register(control.pollable, zmq.POLLIN)
    poller.register(int(death_fd), zmq.POLLIN)
    specs = [spec_to_wire(SPEC)] if role == "worker" else []
    capacity = {"pid": os.getpid(), "device": "cpu", "threads": 1}
    hello = Hello(role, name, int(life), [1], endpoints.stream(int(life)), specs, capacity)
    if mode != "slow":
        control.send(session.stamp(hello))
    if role == "gateway":
        endpoints.gateway.write_text("http://127.0.0.1:1\n")
    while True:
        ready = dict(poller.poll(50))
        if int(death_fd) in ready:
            return 0
        for _, frame in control.receive():
            envelope = decode(frame)
            if not session.accept(envelope):
                continue
            if isinstance(envelope.message, Welcome) and mode == "crash":
                print("about to crash", file=sys.stderr, flush=True)
                return 3
            if isinstance(envelope.message, Exit):
                asked.append(0)
        if mode != "slow":
            control.send(session.stamp(Beat()))
        if asked and not stubborn:
            control.send(session.stamp(Bye("asked to")))
            network.close()
            return 0


if __name__ == "__main__":
    sys.exit(main())

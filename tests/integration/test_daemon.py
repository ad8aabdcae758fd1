"""`podium serve` as operators run it, on the reference model: every process is real."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Daemon, running_daemon
from worker.models.reference_hash import reference_tokens

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

MODEL: dict[str, Any] = {"kind": "reference"}
CONFIG: dict[str, Any] = {
    "name": "daemon",
    "models": {"reference": MODEL},
    "workers": [{"name": "w0", "threads": 1}, {"name": "w1", "threads": 1}],
    "gateway": {"port": 0},
}
Start = Callable[..., Daemon]


def body(content: str, n: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "reference", "messages": messages, "max_tokens": n, "temperature": 0, **more}


def oracle(content: str, n: int) -> str:
    return bytes(reference_tokens(list(content.encode()), n)).decode("ascii")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    daemons: list[Daemon] = []

    def start(**more: Any) -> Daemon:
        folder = tmp_path / str(len(daemons))
        folder.mkdir()
        daemons.append(Daemon({**CONFIG, **more}, folder))
        return daemons[-1]

    yield start
    for d in daemons:
        d.close()


def test_it_serves_the_oracles_tokens_and_leaves_nobody(tmp_path: Path) -> None:
    with running_daemon(CONFIG, tmp_path) as d:
        r = httpx.post(f"{d.url}/v1/chat/completions", json=body("hello", 40), timeout=60)
        assert r.status_code == 200, r.text
        choice = r.json()["choices"][0]
        assert choice["message"]["content"] == oracle("hello", 40)
        assert choice["finish_reason"] == "length"
        d.until(
            lambda: httpx.get(f"{d.url}/readyz", timeout=10).status_code == 200,
            "the gateway to say that it is ready",
            10,
        )
        asyncio.run(d.wait_pages_free())
        root = d.root
    assert f"ready: {r.request.url.scheme}://127.0.0.1:" in d.log
    assert not root.exists(), "the runtime directory was left behind"


def test_sigterm_lets_streams_finish_and_refuses_new_ones(start: Start) -> None:
    d = start(models={"reference": {**MODEL, "options": {"step_ms": 20}}}).wait_ready()
    url = f"{d.url}/v1/chat/completions"
    flows, status = threading.Event(), []
    text: list[str] = []

    def stream() -> None:
        with httpx.stream("POST", url, json=body("long", 150, stream=True), timeout=60) as r:
            for line in r.iter_lines():
                text.append(line)
                flows.set()
            status.append(r.status_code)

    reader = threading.Thread(target=stream)
    reader.start()
    assert flows.wait(30), d.story("no first token")
    d.signal(signal.SIGTERM)
    d.until(lambda: "SIGTERM: draining" in d.log, "the drain to begin", 10)
    refused = httpx.post(url, json=body("late", 5), timeout=30)
    assert refused.status_code == 503, refused.text
    reader.join(30)
    assert d.wait() == 0
    d.wait_gone(1.0)
    assert status == [200]
    chunks = [httpx.Response(200, text=x[6:]).json() for x in text if x.startswith("data: {")]
    said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert said == oracle("long", 150)


def test_a_killed_conductor_leaves_no_descendant(start: Start) -> None:
    d = start().wait_ready()
    assert len(d.descendants()) >= 3
    d.signal(signal.SIGKILL)
    d.wait()
    d.wait_gone(2.0)


def test_a_conductor_killed_while_workers_load_leaves_no_descendant(start: Start) -> None:
    d = start()
    d.until(lambda: "gateway starts" in d.log, "the children to start", 30)
    d.signal(signal.SIGKILL)
    d.wait()
    d.wait_gone(2.0)


def test_a_second_daemon_refuses_and_names_the_first(start: Start) -> None:
    d = start().wait_ready()
    second = start(runtime_dir=str(d.root))
    assert second.wait() == 75
    assert f"in use by another podium daemon, pid {d.process.pid}" in second.log
    r = httpx.post(f"{d.url}/v1/chat/completions", json=body("still", 8), timeout=60)
    assert r.json()["choices"][0]["message"]["content"] == oracle("still", 8)
    assert d.stop() == 0


def test_a_configuration_error_exits_78_before_a_process_starts(start: Start) -> None:
    d = start(gatway={"port": 0})
    assert d.wait() == 78
    assert "gatway: unknown key; did you mean 'gateway'?" in d.log
    assert " starts" not in d.log


def test_a_workers_configuration_error_ends_the_daemon_with_78(start: Start) -> None:
    d = start(models={"reference": {**MODEL, "options": {"eos_evry": 3}}})
    assert d.wait() == 78
    assert "unknown option 'eos_evry'" in d.log.split("giving up:")[1]
    assert "restart=" not in d.log
    d.wait_gone(1.0)


def test_a_crash_looping_worker_ends_the_daemon_naming_the_cause(start: Start) -> None:
    """Each request crashes the worker inside its step."""
    faults = [{"point": "forward", "action": "segv"}]
    d = start(
        models={"reference": {**MODEL, "options": {"faults": faults}}},
        workers=[{"name": "w0", "threads": 1}],
        supervision={"backoff_ms": 10, "max_restarts": 1},
    ).wait_ready()
    url = f"{d.url}/v1/chat/completions"
    first = httpx.post(url, json=body("poison", 5), timeout=90)
    assert first.status_code == 500, first.text
    assert d.wait(60) == 1
    told = d.log.split("giving up:")[1]
    assert "worker w0: ended by SIGSEGV; it ended again after 1 restarts within 300 s" in told
    assert "Segmentation fault" in told, "its last words are not quoted"
    d.wait_gone(1.0)


def test_a_killed_gateway_comes_back(start: Start) -> None:
    d = start().wait_ready()
    pid = d.child("gateway")["pid"]
    os.kill(pid, signal.SIGKILL)
    d.wait_child("gateway", pid)
    r = httpx.post(f"{d.url}/v1/chat/completions", json=body("again", 8), timeout=60)
    assert r.json()["choices"][0]["message"]["content"] == oracle("again", 8)
    assert d.stop() == 0

"""A snapshot as a page of text for people."""

from collections.abc import Sequence
from typing import Any

from protocol.stats import MachineStats, Snapshot

_PAGES = ("pages_free", "pages_total")


def render(snapshot: Snapshot) -> str:
    c, m = snapshot["conductor"], snapshot["machine"]
    head = (
        f"{c['name']}  {c['phase']}  pid {c['pid']}  up {_duration(c['uptime_s'])}  "
        f"podium {c['version']}"
    )
    where = snapshot["gateway_url"] or "no gateway"
    blocks = [
        f"{head}\n{where}  models: {', '.join(m['models']) or 'none yet'}",
        _requests(m),
        _children(snapshot),
        _workers(m),
        _footer(snapshot),
    ]
    return "\n\n".join(b for b in blocks if b)


def _requests(m: MachineStats) -> str:
    r = m["requests"]
    closed = ", ".join(f"{n} {k}" for k, n in r["closed"].items()) or "none"
    return (
        f"requests  {r['submitted']} submitted, {r['open']} open ({r['active']} rows, "
        f"{r['queued']} queued with {r['queued_tokens']} tokens)\nclosed    {closed}"
    )


def _children(snapshot: Snapshot) -> str:
    rows = [
        (
            x["name"], x["role"], str(x["pid"] or "-"), x["state"], str(x["restarts"]),
            x["last_exit"] or "-",
        )
        for x in snapshot["children"]
    ]  # fmt: skip
    return _table(("process", "role", "pid", "state", "restarts", "last exit"), rows)


def _workers(m: MachineStats) -> str:
    rows = [
        (
            w["name"], w["state"], w["device"], str(w["rows"]), str(w["batches"]),
            f"{w['committed_pages']}/{w['pages']}", str(w["steps"]), f"{w['last_heard_ms']} ms",
            _load(w["load"]),
        )
        for w in m["workers"]
    ]  # fmt: skip
    if not rows:
        return ""
    head = ("worker", "state", "device", "rows", "batches", "pages", "steps", "heard", "load")
    return _table(head, rows)


def _footer(snapshot: Snapshot) -> str:
    links, ticks = snapshot["links"], snapshot["ticks"]
    dropped = ", ".join(f"{n} {k}" for k, n in links["dropped"].items()) or "none"
    counters = {k: n for k, n in snapshot["machine"]["counters"].items() if n}
    lines = [
        f"links     {links['peers']} peers, {links['received']} frames in, {links['sent']} out, "
        f"dropped: {dropped}",
        f"turns     {sum(ticks['counts'])}, mean {_mean(ticks['total_ms'], ticks['counts'])} ms, "
        f"slowest {ticks['max_ms']} ms",
    ]
    if counters:
        lines.append("counters  " + ", ".join(f"{n} {k}" for k, n in counters.items()))
    if snapshot["bugs"]:
        lines.append(f"bugs      {snapshot['bugs']}: see the log")
    return "\n".join(lines)


def _load(load: dict[str, Any]) -> str:
    """The worker's own figures that say something now; pages and rows have columns of their own."""
    shown = {k: v for k, v in load.items() if isinstance(v, int | float) and v and k != "rows"}
    return " ".join(f"{k}={_short(v)}" for k, v in shown.items() if k not in _PAGES)


def _mean(total: float, counts: Sequence[int]) -> float:
    return round(total / max(1, sum(counts)), 3)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    s = int(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)) for r in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)

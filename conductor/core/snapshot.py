"""What the stats socket shows, as plain data."""

from typing import Any

from conductor.core.registry import Owner, Worker
from conductor.core.state import State


def take(s: State, now: float) -> dict[str, Any]:
    """Shape: `protocol.stats.Snapshot`. Durations in milliseconds. Costs peers, not requests."""
    workers = list(s.registry.workers.values())
    waiting = s.queue.length + sum(len(t.members) for t in s.suspects)
    ready = any(w.placeable and now - w.last_heard <= s.silence for w in workers)
    return {
        "requests": {
            "submitted": s.submitted,
            "open": s.open,
            "queued": waiting,
            "queued_tokens": s.queue.tokens,
            "active": sum(len(w.rows) for w in workers),
            "closed": {reason.name.lower(): n for reason, n in sorted(s.closed.items())},
        },
        "workers": [_worker(w, now) for w in sorted(workers, key=lambda w: w.name)],
        "owners": [_owner(o) for o in s.registry.owners.values()],
        "models": sorted(s.registry.models),
        "ready": ready and not s.fatal,
        "draining": s.draining,
        "counters": dict(s.counters),
    }


def _worker(w: Worker, now: float) -> dict[str, Any]:
    return {
        "name": w.name,
        "life": w.life,
        "pid": w.capacity.get("pid", 0),
        "state": w.state.name.lower() if w.linked else "unlinked",
        "device": w.capacity.get("device", ""),
        "rows": len(w.rows),
        "batches": len(w.ahead) + len(w.planned) + len(w.standing),
        "committed_pages": w.committed_pages,
        "pages": sum(spec.pages for spec in w.specs.values()),
        "steps": w.steps,
        "step_age_ms": round(w.step_age * 1000),
        "last_heard_ms": round((now - w.last_heard) * 1000),
        "load": dict(w.load),
        "models": sorted(w.specs),
    }


def _owner(o: Owner) -> dict[str, Any]:
    return {"name": o.name, "role": o.role, "life": o.life, "streams": len(o.streams)}

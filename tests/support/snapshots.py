"""A snapshot with something in every part."""

from protocol.stats import SCHEMA, Snapshot


def snapshot() -> Snapshot:
    return {
        "schema": SCHEMA,
        "conductor": {
            "name": "podium", "life": 1 << 63, "pid": 41, "version": "0.1.0", "phase": "ready",
            "uptime_s": 3661.5,
        },
        "machine": {
            "requests": {
                "submitted": 5, "open": 1, "queued": 0, "queued_tokens": 0, "active": 1,
                "closed": {"stop": 3, "cancelled": 1},
            },
            "workers": [{
                "name": "w0", "life": 7, "pid": 42, "state": "ready", "device": "cpu", "rows": 1,
                "batches": 1, "committed_pages": 3, "pages": 100, "steps": 17, "step_age_ms": 0,
                "last_heard_ms": 12, "models": ["reference"],
                "load": {"pages_free": 97, "wasted": 2, "stage_s": {}, "held": 0},
            }],
            "owners": [{"name": "gateway", "role": "gateway", "life": 8, "streams": 1}],
            "models": ["reference"],
            "ready": True,
            "draining": False,
            "counters": {"replayed": 1, "rejected": 0},
        },
        "children": [
            {
                "name": "w0", "role": "worker", "pid": 42, "life": 7, "state": "ready",
                "restarts": 2, "last_exit": "ended by SIGKILL",
            },
            {
                "name": "gateway", "role": "gateway", "pid": 0, "life": 8, "state": "backoff",
                "restarts": 0, "last_exit": "",
            },
        ],
        "gateway_url": "http://127.0.0.1:8000",
        "links": {
            "peers": 2, "sent": 10, "received": 11, "refused": 0, "waiting_bytes": 0,
            "dropped": {"malformed": 2},
        },
        "ticks": {"bounds_ms": [1.0], "counts": [9, 1], "total_ms": 5.0, "max_ms": 2.5},
        "bugs": 1,
        "log": {"waiting_bytes": 0, "dropped_lines": 0},
    }  # fmt: skip

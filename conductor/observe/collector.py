"""Puts one snapshot together from whoever answers `statistics()`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.stats import (
    SCHEMA,
    ChildStats,
    ConductorStats,
    HistogramStats,
    LinkStats,
    Snapshot,
)


@dataclass(frozen=True, slots=True)
class Sources:
    """One callable per part of the snapshot; each is cheap and has no side effect."""

    conductor: Callable[[], ConductorStats]
    machine: Callable[[], Any]
    children: Callable[[], list[ChildStats]]
    gateway_url: Callable[[], str]
    links: Callable[[], LinkStats]
    ticks: Callable[[], HistogramStats]
    bugs: Callable[[], int]
    log: Callable[[], dict[str, int]]


class Collector:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def snapshot(self) -> Snapshot:
        s = self._sources
        return {
            "schema": SCHEMA,
            "conductor": s.conductor(),
            "machine": s.machine(),
            "children": s.children(),
            "gateway_url": s.gateway_url(),
            "links": s.links(),
            "ticks": s.ticks(),
            "bugs": s.bugs(),
            "log": s.log(),
        }

"""What every benchmark shares: the record it writes, the machine it ran on, its plot, its options.

A benchmark is a module with `measure(smoke) -> Record`. `python -m scripts.bench.NAME` measures and
writes docs/benchmarks/NAME.json and NAME.png; `--smoke` runs the same code in a second or two and
writes nothing unless `--out` says where. Ratios within one run are what counts: the CPUs of these
machines are shared, and a figure in seconds holds on the machine that is named.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "benchmarks"
PACKAGES = ("pyzmq", "msgpack", "uvloop", "numpy", "torch")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure and what it should be; `met` is None where no goal was set."""

    measure: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines by label; `log` axes: "", "x" or "xy"."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    log: str = ""


@dataclass(slots=True)
class Record:
    """What one run of one benchmark found. `what`: the question; `against`: the comparison."""

    name: str
    what: str
    against: str
    config: dict[str, Any]
    seeds: list[int]
    summary: list[Goal]
    tables: list[Table]
    notes: list[str]
    plot: Plot
    smoke: bool = False
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d", time.gmtime()))
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = self.machine or machine()
        self.versions = self.versions or versions()

    def to_json(self) -> str:
        told = asdict(self)
        told["plot"] = self.plot.title
        return json.dumps(told, indent=1, ensure_ascii=False) + "\n"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(self.to_json(), encoding="utf-8")
        draw(self.plot, folder / f"{self.name}.png")


def machine() -> dict[str, Any]:
    """What a figure depends on; no host name. `load`: runnable processes in the last minute."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def draw(plot: Plot, path: Path) -> None:
    """A small PNG. Needs the extra `bench`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=90)
    for label, points in plot.lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", ms=3, label=label)
    if "x" in plot.log:
        axes.set_xscale("log", base=2)
    if "y" in plot.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


# ---- figures


def exponent(points: Points) -> float:
    """p of y ~ x ** p, by least squares over logarithms: 1 is linear, 0 is flat."""
    import numpy as np

    xs, ys = (np.log([max(p[i], 1e-12) for p in points]) for i in (0, 1))
    return float(np.polyfit(xs, ys, 1)[0])


def slope(points: Points) -> tuple[float, float]:
    """(per x, at 0) of a straight line by least squares."""
    import numpy as np

    a, b = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return float(a), float(b)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def rounded(value: float, digits: int = 3) -> float:
    """To significant digits."""
    return float(f"{value:.{digits}g}")


# ---- options


def main(measure: Callable[[bool], Record], doc: str) -> Record:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="the same code, seconds, no record")
    parser.add_argument("--out", type=Path, help="where the record goes; default: docs/benchmarks")
    options = parser.parse_args()
    record = measure(options.smoke)
    record.smoke = options.smoke
    if options.out or not options.smoke:
        record.write(options.out or OUT)
    for goal in record.summary:
        print(f"{goal.measure}: {goal.value} {goal.unit} {goal.goal} {_mark(goal)}".rstrip())
    return record


def _mark(goal: Goal) -> str:
    return "" if goal.met is None else ("met" if goal.met else "NOT met")

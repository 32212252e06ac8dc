"""Which of the goals of the project a comparison meets, and by how much."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "loraplex"
SPEED = "output_tok_s"
TIMES = "times"
MIXED = "base + 8 adapters c8"

# Label, peers (none: whichever is fastest), and how many times as fast as they we want to be.
FASTER: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("base c1", (), 1.25),
    ("base c8", ("OpenVINO",), 1.2),
    ("base c8", ("vLLM",), 2.0),
    ("one adapter c8", ("OpenVINO",), 1.4),
    (MIXED, (), 6.0),
    ("base + 16 adapters c16", ("vLLM",), 6.0),
    ("prefix-heavy base + 8 adapters c8", ("vLLM",), 15.0),
    ("INT8 base c8", ("OpenVINO",), 1.2),
)
LEAST_MIXED, LEAST_OF_ROOF = 0.85, 0.8
MOST_FIRST_TOKEN, MOST_MEMORY_MIB, MOST_START_S = 1.15, 2560, 15


class Figures:
    """Medians over the runs of a comparison, without what had an error."""

    def __init__(self, runs: Sequence[dict[str, Any]]) -> None:
        self._runs = runs

    @property
    def contenders(self) -> list[str]:
        """Ours first."""
        names = dict.fromkeys(run["contender"] for run in self._runs)
        return [OURS, *(name for name in names if name != OURS)]

    def of(self, contender: str, label: str, field: str = SPEED) -> float | None:
        values = [
            record[field]
            for run in self._runs
            if run["contender"] == contender
            for record in run["records"]
            if record["label"] == label and not record.get("errors") and record.get(field)
        ]
        return statistics.median(values) if values else None

    def best(self, label: str, peers: Sequence[str]) -> tuple[str, float] | None:
        """The fastest of the peers, or of all where none is named."""
        among = peers or self.contenders[1:]
        found = [(speed, name) for name in among if (speed := self.of(name, label))]
        return max(found)[::-1] if found else None


@dataclass(frozen=True)
class Goal:
    """One line of the table. `ratio` is what is judged: None where something was not measured."""

    case: str
    ours: str
    against: str
    ratio: float | None
    limit: float
    at_least: bool = True
    unit: str = TIMES

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}"

    @property
    def shown_ratio(self) -> str:
        return f"{self.ratio:.2f}" if self.ratio and self.unit == TIMES else "-"

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        is_met = self.ratio >= self.limit if self.at_least else self.ratio <= self.limit
        return "met" if is_met else "missed"


def goals(figures: Figures, roof: float | None) -> list[Goal]:
    """All of them. `roof`: tokens per second of one sequence that the memory's speed allows."""
    return [
        *(faster_than_peers(figures, *row) for row in FASTER),
        near_the_roof(figures, roof),
        near_our_base(figures),
        first_token(figures),
        memory(figures),
        start(figures),
    ]


def faster_than_peers(figures: Figures, label: str, peers: tuple[str, ...], limit: float) -> Goal:
    ours, best = figures.of(OURS, label), figures.best(label, peers)
    against = f"{best[0]} {best[1]:.1f}" if best else " or ".join(peers) or "the best peer"
    return Goal(label, shown(ours), against, over(ours, best[1] if best else None), limit)


def near_the_roof(figures: Figures, roof: float | None) -> Goal:
    gap = figures.of(OURS, "base c1", "itl_mean_ms")
    ours = 1000 / gap if gap else None
    against = f"memory roof {shown(roof)}"
    return Goal("base c1, decode alone", shown(ours), against, over(ours, roof), LEAST_OF_ROOF)


def near_our_base(figures: Figures) -> Goal:
    ours, base = figures.of(OURS, MIXED), figures.of(OURS, "base c8")
    return Goal(MIXED, shown(ours), f"our base c8 {shown(base)}", over(ours, base), LEAST_MIXED)


def first_token(figures: Figures) -> Goal:
    def adapter_over_base(contender: str) -> float | None:
        adapter = figures.of(contender, "first token adapter", "ttft_p50_ms")
        return over(adapter, figures.of(contender, "first token base", "ttft_p50_ms"))

    ours, theirs = of_each(figures, adapter_over_base)
    case = "first token of 1,056: adapter over base"
    return Goal(case, shown(ours, 2), theirs, ours, MOST_FIRST_TOKEN, at_least=False)


def memory(figures: Figures) -> Goal:
    """Of all processes in the end, less what surely is resident of the KV pool."""

    def mebibytes(contender: str) -> float | None:
        whole = figures.of(contender, "end", "pss_mb")
        return whole - (figures.of(contender, "end", "kv_resident_mb") or 0) if whole else None

    ours, theirs = of_each(figures, mebibytes)
    case = "memory of all processes, KV pool apart"
    return Goal(case, shown(ours), theirs, ours, MOST_MEMORY_MIB, at_least=False, unit="MiB")


def start(figures: Figures) -> Goal:
    ours, theirs = of_each(figures, lambda contender: figures.of(contender, "ready", "seconds"))
    case = "start until ready"
    return Goal(case, shown(ours), theirs, ours, MOST_START_S, at_least=False, unit="s")


def of_each(figures: Figures, value: Callable[[str], float | None]) -> tuple[float | None, str]:
    """Our value, and the peers' as text."""
    theirs = [(name, value(name)) for name in figures.contenders[1:]]
    return value(OURS), ", ".join(f"{name} {shown(it, 2)}" for name, it in theirs if it)


def over(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def shown(number: float | None, digits: int = 1) -> str:
    return "-" if number is None else f"{number:.{digits}f}"

"""Service of backlogged tenants, and what fairness costs.

    python benchmarks/sharing/fairness.py MODEL [--threads N] [--repeats N] [--save FILE] [--quick]

Two and five tenants, of equal weight and of weights 1 and 3, ask for more than there is, by turns
for long prompts and answers and for short ones. All requests are there at the start, one
tenant's after the other's. Runs of `fair` and `fcfs` alternate, and `fair / fcfs` is the median of
the ratios of neighbours. Both do the same work, so `steps` says how full the rows were.

`gap`: of two tenants that both have requests waiting, the largest difference of what they were
served over any stretch of time, in prompt tokens (a sampled one counts twice) by weight. `bound`:
the most that docs/sharing.md allows; of all pairs the one that comes nearest to it. `paper`: the
bound of VTC, 2 max(L, 2 M), for the lightest tenant.
"""

import argparse
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations, cycle, islice
from operator import truediv
from statistics import median

from driver import open_engine, parser, random_prompt, request, save, show

from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.scheduling.fair_share import FairPolicy
from loraplex.engine.scheduling.policy import FCFSPolicy, SchedulingPolicy
from loraplex.engine.scheduling.queues import WaitingQueue
from loraplex.engine.scheduling.service_ledger import price
from loraplex.engine.sequence import Sequence

POLICIES: dict[str, type[SchedulingPolicy]] = {"fair": FairPolicy, "fcfs": FCFSPolicy}
CASES: dict[str, tuple[float, ...]] = {
    "two, equal": (1, 1),
    "two, 1:3": (1, 3),
    "five, equal": (1, 1, 1, 1, 1),
    "five, 1:3": (1, 3, 1, 3, 1),
}
NUM_ROWS = 8


@dataclass(frozen=True)
class Sizes:
    shapes: tuple[tuple[int, int], ...]  # prompt and output tokens, by turns
    tokens: int  # that all tenants ask for together, about


# So many that the rows are full to the end under either policy: else a whole wave more or less
# would be a matter of which request happens to be the last.
FULL = Sizes(((160, 40), (80, 20)), 7000)
QUICK = Sizes(((12, 2), (4, 5)), 240)


@dataclass(frozen=True)
class Run:
    steps: int
    tokens_per_second: float  # of prompts and answers, of all tenants
    gap: float
    bound: float


class Watch:
    """Follows what each tenant was served while it had requests waiting."""

    def __init__(self, policy: SchedulingPolicy, weights: dict[str, float]) -> None:
        self._policy, self._weights = policy, weights
        self._extremes: dict[tuple[str, str], tuple[float, float]] = {}
        self._stakes = dict.fromkeys(weights, 0.0)

    def note(self, waiting: WaitingQueue, running: list[Sequence]) -> None:
        for pair in combinations(sorted(waiting.tenants), 2):
            now = self._service(pair[0]) - self._service(pair[1])
            low, high = self._extremes.get(pair, (now, now))
            self._extremes[pair] = min(low, now), max(high, now)
        stakes: Counter[str] = Counter()
        for s in running:
            left = (s.sampling.max_tokens or 0) - s.num_output_tokens
            stakes[s.tenant] += price(s.num_tokens, left, 0) / self._weights[s.tenant]
        self._stakes = {name: max(old, stakes[name]) for name, old in self._stakes.items()}

    def largest_gap(self) -> tuple[float, float]:
        """The gap that comes nearest to its bound, and that bound."""
        gaps = [
            (high - low, max(1.0, self._stakes[a] + self._stakes[b]))
            for (a, b), (low, high) in self._extremes.items()
        ]
        return max(gaps, key=lambda gap: gap[0] / gap[1], default=(0.0, 1.0))

    def _service(self, tenant: str) -> float:
        service = self._policy.ledger.of(tenant)
        return price(service.prefill_tokens, service.decode_tokens, 0) / service.weight


def run_once(
    engine: LLMEngine, policy: SchedulingPolicy, weights: tuple[float, ...], sizes: Sizes, seed: int
) -> Run:
    """Asks for everything at once, and steps until all of it is there."""
    scheduler = engine._scheduler
    scheduler.policy = policy
    names = {f"t{index}": weight for index, weight in enumerate(weights)}
    for name, weight in names.items():
        policy.ledger.set_weight(name, weight)
    num_tokens = ask(engine, names, sizes, seed)
    watch = Watch(policy, names)
    watch.note(scheduler.waiting, scheduler.running)
    num_steps, start = 0, time.perf_counter()
    while engine.has_work:
        engine.step()
        num_steps += 1
        watch.note(scheduler.waiting, scheduler.running)
    seconds = time.perf_counter() - start
    gap, bound = watch.largest_gap()
    return Run(num_steps, round(num_tokens / seconds, 1), round(gap), round(bound))


def ask(engine: LLMEngine, names: dict[str, float], sizes: Sizes, seed: int) -> int:
    """Adds each tenant's requests, in proportion to its weight; returns their tokens in all."""
    rounds = sizes.tokens / sum(map(sum, sizes.shapes)) / sum(names.values())
    total = 0
    for place, (name, weight) in enumerate(names.items()):
        count = round(rounds * weight) * len(sizes.shapes)
        for index, (prompt, output) in enumerate(islice(cycle(sizes.shapes), place, place + count)):
            number = seed * 100_000 + place * 1_000 + index
            tokens = random_prompt(engine, prompt, number)
            engine.add(request(f"{name} {number}", tokens, output, tenant=name))
            total += prompt + output
    return total


def paper_bound(weights: tuple[float, ...], sizes: Sizes) -> float:
    longest = max(prompt for prompt, _ in sizes.shapes)
    batch = NUM_ROWS * max(prompt + output for prompt, output in sizes.shapes)
    return 2 * price(0, batch, 0) / min(weights) if 2 * batch > longest else 2 * longest


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3, help="runs of each policy")
    chosen = options.parse_args()
    sizes = QUICK if chosen.quick else FULL
    figures = measure(chosen, sizes)
    heads = [
        "tenants",
        "gap",
        "bound",
        "paper",
        "fcfs gap",
        "fair steps",
        "fcfs steps",
        "fair tok/s",
        "fcfs tok/s",
        "fair / fcfs",
    ]
    show(heads, [list(row.values()) for row in figures])
    save(chosen, "fairness", {"sizes": asdict(sizes), "rows": NUM_ROWS, "cases": figures})


def measure(chosen: argparse.Namespace, sizes: Sizes) -> list[dict[str, object]]:
    figures: list[dict[str, object]] = []
    with open_engine(chosen, max_num_seqs=NUM_ROWS, max_num_batched_tokens=256) as engine:
        run_once(engine, FCFSPolicy(), (1, 1), QUICK, seed=0)  # kernels are built, tapes recorded
        for number, (case, weights) in enumerate(CASES.items(), 1):
            runs: dict[str, list[Run]] = {name: [] for name in POLICIES}
            for repeat in range(chosen.repeats):
                for name in list(POLICIES)[:: -1 if repeat % 2 else 1]:
                    seed = 10 * number + repeat + 1000 * (name == "fcfs")
                    runs[name].append(run_once(engine, POLICIES[name](), weights, sizes, seed))
            figures.append(summary(case, weights, sizes, runs))
    return figures


def summary(
    case: str, weights: tuple[float, ...], sizes: Sizes, runs: dict[str, list[Run]]
) -> dict[str, object]:
    worst = max(runs["fair"], key=lambda run: run.gap / run.bound)
    fair, fcfs = ([run.tokens_per_second for run in runs[name]] for name in POLICIES)
    return {
        "tenants": case,
        "gap": worst.gap,
        "bound": worst.bound,
        "paper": round(paper_bound(weights, sizes)),
        "fcfs_gap": max(run.gap for run in runs["fcfs"]),
        "fair_steps": median(run.steps for run in runs["fair"]),
        "fcfs_steps": median(run.steps for run in runs["fcfs"]),
        "fair_tok_s": median(fair),
        "fcfs_tok_s": median(fcfs),
        "ratio": round(median(map(truediv, fair, fcfs)), 3),
    }


if __name__ == "__main__":
    main()

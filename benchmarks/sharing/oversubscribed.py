"""What it costs when the requests under way need 1.5 times the KV memory that there is.

    python benchmarks/sharing/oversubscribed.py MODEL [--threads N] [--repeats N] [--save FILE]

All requests are there at the start, with more of them than rows. What the rows may need is taken as
their number times the tokens of the longest request. `enough` has that much KV memory, the other
two have it over 1.5: `offload` with host memory below the pool, `recompute` without. Runs of the
three alternate over the same requests: once with answers of three lengths, once with equal ones,
whose memory grows in step. `÷ enough` is the median of the ratios of neighbouring runs. `rows` is
how many sequences ran per step. `tokens computed` counts those twice that were computed again.
"""

import argparse
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import truediv
from statistics import median

from driver import open_engine, parser, random_prompt, request, save, show

from loraplex.engine.llm_engine import LLMEngine

FACTOR = 1.5


@dataclass(frozen=True)
class Sizes:
    rows: int
    requests: int
    prompt: int
    outputs: tuple[int, ...]  # request i has the i-th, modulo

    @property
    def longest(self) -> int:
        """Tokens of a request of this or of a smaller size, and one."""
        return self.prompt + max(self.outputs) + 1


FULL = {
    "mixed": Sizes(rows=16, requests=64, prompt=64, outputs=(32, 64, 96)),
    "equal": Sizes(rows=16, requests=64, prompt=64, outputs=(64,)),
}
QUICK = {"equal": Sizes(rows=4, requests=8, prompt=16, outputs=(24,))}


@dataclass(frozen=True)
class Run:
    tokens_per_second: float  # prompt and output tokens
    preemptions: int
    most_of_one: int  # preemptions of a single request
    rows: float  # sequences that ran per step
    computed: int  # tokens; those of prompts and answers once, and what was computed again
    fetched_bytes: int


def memory_for(options: argparse.Namespace, sizes: Sizes) -> int:
    """Bytes of KV memory that all rows need for whole requests."""
    looked_at = 64 << 20
    with open_engine(options, kv_cache_memory=looked_at, max_model_len=sizes.longest) as engine:
        kv = engine._scheduler.kv
        of_one = -(-(sizes.longest - 1) // kv.block_size) * len(kv.groups)
        return (sizes.rows * of_one + 1) * (looked_at // (engine.info.num_blocks + 1))


def run_once(engine: LLMEngine, sizes: Sizes, seed: int) -> Run:
    """Asks for everything at once, and steps until all of it is there."""
    scheduler, before = engine._scheduler, engine.stats()
    outputs = [sizes.outputs[i % len(sizes.outputs)] for i in range(sizes.requests)]
    for index, output in enumerate(outputs):
        number = seed * 10_000 + index
        prompt = random_prompt(engine, sizes.prompt, number)
        engine.add(request(f"r{number}", prompt, output, tenant=f"t{index % 4}"))
    sequences = list(scheduler.waiting)
    ledger = scheduler.policy.ledger
    served = sum(ledger.of(name).prefill_tokens for name in ledger.tenants)
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    after = engine.stats()
    return Run(
        tokens_per_second=round((sizes.requests * sizes.prompt + sum(outputs)) / seconds, 1),
        preemptions=after.num_preemptions - before.num_preemptions,
        most_of_one=max(sequence.num_preemptions for sequence in sequences),
        rows=round(sum(outputs) / (after.num_steps - before.num_steps), 1),
        computed=sum(ledger.of(name).prefill_tokens for name in ledger.tenants)
        - served
        + sum(outputs),
        fetched_bytes=after.offload.in_bytes - before.offload.in_bytes,
    )


def measure(options: argparse.Namespace, workload: str, sizes: Sizes) -> list[dict[str, object]]:
    enough = memory_for(options, sizes)
    short = int(enough / FACTOR)
    common = {"max_num_seqs": sizes.rows, "max_model_len": sizes.longest}
    settings = {
        "enough": {"kv_cache_memory": enough},
        "offload": {"kv_cache_memory": short, "offload_memory": enough},
        "recompute": {"kv_cache_memory": short},
    }
    runs: dict[str, list[Run]] = {name: [] for name in settings}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(open_engine(options, **common, **chosen))
            for name, chosen in settings.items()
        }
        for engine in engines.values():
            run_once(engine, QUICK["equal"], seed=0)  # kernels are built, tapes recorded
        for repeat in range(1, options.repeats + 1):
            for name, engine in engines.items():
                runs[name].append(run_once(engine, sizes, repeat))
    return [{"answers": workload} | summary(name, runs[name], runs["enough"]) for name in settings]


def summary(name: str, runs: list[Run], enough: list[Run]) -> dict[str, object]:
    speeds, full = ([run.tokens_per_second for run in some] for some in (runs, enough))
    return {
        "memory": name,
        "tok_s": round(median(speeds), 1),
        "of_enough": round(median(map(truediv, speeds, full)), 3),
        "rows": median(run.rows for run in runs),
        "preemptions": max(run.preemptions for run in runs),
        "most_of_one": max(run.most_of_one for run in runs),
        "computed": round(median(run.computed for run in runs)),
        "fetched_mib": round(median(run.fetched_bytes for run in runs) / 2**20, 1),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=2, help="runs of each")
    chosen = options.parse_args()
    workloads = QUICK if chosen.quick else FULL
    figures = [row for name, sizes in workloads.items() for row in measure(chosen, name, sizes)]
    heads = ["answers", "memory", "tok/s", "÷ enough", "rows", "preemptions", "most of one"]
    show([*heads, "tokens computed", "fetched MiB"], [list(row.values()) for row in figures])
    sizes = {name: asdict(sizes) for name, sizes in workloads.items()}
    save(chosen, "oversubscribed", {"sizes": sizes, "factor": FACTOR, "memory": figures})


if __name__ == "__main__":
    main()

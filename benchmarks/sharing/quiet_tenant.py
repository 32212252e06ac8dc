"""A quiet tenant's prefix cache beside a tenant that floods the pool.

    python benchmarks/sharing/quiet_tenant.py MODEL [--threads N] [--rounds N] [--save FILE]

The quiet tenant asks in turns with a few prompts of its own, each time with another ending. Before
each of its requests the flooder sends a long prompt that nobody sends again. The memory holds the
quiet tenant's prompts several times over, but not what the flooder sends in between.

`hit rate`: of the quiet tenant's prompt tokens, how many came from the cache, its first request of
each prompt apart. `of alone`: compared with the same requests without the flooder. With budgets,
its floor is the blocks that it had cached at the end of the run alone.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from driver import open_engine, parser, random_prompt, request, save, show

from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import SetTenantShares, TenantShare, TenantStats, TokenEvent, Usage

QUIET, FLOODER = "quiet", "flooder"


@dataclass(frozen=True)
class Sizes:
    num_prompts: int  # of the quiet tenant
    prompt: int  # their tokens
    ending: int
    flood: int  # tokens of one of the flooder's prompts
    settings: dict[str, int]


FULL = Sizes(4, 256, 16, 1024, {"kv_cache_memory": 64 << 20, "max_model_len": 1280})
QUICK = Sizes(2, 16, 4, 32, {"max_model_len": 64})


@dataclass(frozen=True)
class Case:
    name: str
    eviction: str
    has_flooder: bool = True
    has_floor: bool = False


CASES = (
    Case("alone", "cost", has_flooder=False),
    Case("flooded, budgets off, lru", "lru"),
    Case("flooded, budgets off, cost", "cost"),
    Case("flooded, budgets on, lru", "lru", has_floor=True),
    Case("flooded, budgets on, cost", "cost", has_floor=True),
)


@dataclass(frozen=True)
class Run:
    case: str
    hit_rate: float
    of_alone: float
    median_ms: float  # from a quiet request to its end, the flooder's prompt beside it
    floor: int  # blocks
    cached_blocks: int  # of the quiet tenant, at the end
    evictions: dict[str, int]  # of its blocks, by cause


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=32, help="requests of the quiet tenant")
    arguments = options.parse_args()
    sizes = QUICK if arguments.quick else FULL
    rounds = 6 if arguments.quick else arguments.rounds
    runs: list[Run] = []
    for case in CASES:
        with open_engine(arguments, eviction=case.eviction, **sizes.settings) as engine:
            alone = runs[0] if runs else None
            runs.append(run_case(engine, case, sizes, rounds, alone))
    show(
        ["case", "hit rate", "of alone", "median ms", "floor", "cached blocks", "evicted"],
        [
            [
                run.case,
                f"{run.hit_rate:.1%}",
                f"{run.of_alone:.1%}",
                f"{run.median_ms:.0f}",
                run.floor,
                run.cached_blocks,
                sum(run.evictions.values()),
            ]
            for run in runs
        ],
    )
    save(arguments, "quiet_tenant", [asdict(run) for run in runs])


def run_case(engine: LLMEngine, case: Case, sizes: Sizes, rounds: int, alone: Run | None) -> Run:
    floor = alone.cached_blocks if alone is not None and case.has_floor else 0
    if floor:
        engine.submit(SetTenantShares("shares", [TenantShare(QUIET, floor=floor)]))
    flood = _flooder(engine, sizes) if case.has_flooder else lambda index: None
    prompts = [random_prompt(engine, sizes.prompt, seed) for seed in range(sizes.num_prompts)]
    usages, seconds = [], []
    for index in range(rounds):
        flood(index)
        ending = random_prompt(engine, sizes.ending, 1_000 + index)
        prompt = [*prompts[index % sizes.num_prompts], *ending]
        start = time.perf_counter()
        engine.add(request(f"quiet {index}", prompt, 2, tenant=QUIET))
        usages.append(_run(engine, f"quiet {index}"))
        seconds.append(time.perf_counter() - start)
    later = usages[sizes.num_prompts :]
    hit_rate = sum(u.cached_tokens for u in later) / sum(u.prompt_tokens for u in later)
    stats = _stats(engine)
    return Run(
        case=case.name,
        hit_rate=round(hit_rate, 4),
        of_alone=round(hit_rate / alone.hit_rate, 4) if alone is not None else 1.0,
        median_ms=round(1e3 * median(seconds[sizes.num_prompts :]), 1),
        floor=floor,
        cached_blocks=stats.cached_blocks,
        evictions=stats.evictions,
    )


def _flooder(engine: LLMEngine, sizes: Sizes) -> Callable[[int], None]:
    def flood(index: int) -> None:
        prompt = random_prompt(engine, sizes.flood, 1_000_000 + index)
        engine.add(request(f"flood {index}", prompt, 1, tenant=FLOODER))

    return flood


def _run(engine: LLMEngine, request_id: str) -> Usage:
    """Steps until all is done; returns what one request used."""
    usage = None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.request_id == request_id and event.usage:
                usage = event.usage
    if usage is None:
        raise RuntimeError(f"{request_id} did not end")
    return usage


def _stats(engine: LLMEngine) -> TenantStats:
    return next(tenant for tenant in engine.stats().tenants if tenant.tenant == QUIET)


if __name__ == "__main__":
    main()

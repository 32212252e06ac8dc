"""Whether an attacker's clock tells what another tenant asked.

    python benchmarks/sharing/isolation.py MODEL [--threads N] [--trials N] [--save FILE]

A victim asks with a published base prompt and a private suffix. An attacker then asks twice with
the same base prompt: once with the victim's suffix, once with another one, in random order, and
measures the time to the first token. `AUC` is the chance that the right guess was the faster of
two: 0.5 is no better than tossing a coin, 1 is certainty. `off` gives both tenants one namespace,
which the server never does: it shows that the measurement would see a leak.
"""

import random
from dataclasses import asdict, dataclass
from itertools import product

from asking import ask, publish
from driver import open_engine, parser, random_prompt, request, save, show

from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import BasePromptRef


@dataclass(frozen=True)
class Sizes:
    base: int  # tokens
    suffix: int
    trials: int
    max_model_len: int


FULL = Sizes(base=256, suffix=64, trials=200, max_model_len=512)
QUICK = Sizes(base=16, suffix=16, trials=4, max_model_len=64)
WARM_UPS = 5


@dataclass(frozen=True)
class Row:
    isolation: str
    auc: float
    error: float  # standard error of the AUC where nothing is to be seen
    median_right: float  # seconds
    median_wrong: float
    max_cached_private: int  # tokens behind the base prompt that the attacker was told are cached


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trials", type=int, help="of either guess (200)")
    arguments = options.parse_args()
    sizes = QUICK if arguments.quick else FULL
    trials = arguments.trials or sizes.trials
    with open_engine(arguments, max_model_len=sizes.max_model_len) as engine:
        base = publish(engine, random_prompt(engine, sizes.base, seed=0))
        rows = [measure(engine, base, sizes, trials, isolation) for isolation in ("on", "off")]
    show(
        ["isolation", "AUC", "chance", "right guess", "wrong guess", "private tokens cached"],
        [
            [
                row.isolation,
                f"{row.auc:.3f}",
                f"0.5 ± {row.error:.3f}",
                f"{row.median_right * 1e3:.2f} ms",
                f"{row.median_wrong * 1e3:.2f} ms",
                row.max_cached_private,
            ]
            for row in rows
        ],
    )
    save(arguments, "isolation", [asdict(row) for row in rows])


def measure(
    engine: LLMEngine, base: BasePromptRef, sizes: Sizes, trials: int, isolation: str
) -> Row:
    spaces = {"victim": "victim", "attacker": "attacker" if isolation == "on" else "victim"}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    max_cached, order, seeds = 0, random.Random(0), random.Random(isolation)
    for trial in range(-WARM_UPS, trials):
        secret, other = (
            random_prompt(engine, sizes.suffix, seeds.randrange(2**31)) for _ in range(2)
        )
        ask(
            engine,
            request("victim", secret, 1, namespace=spaces["victim"], base_prompt=base),
        )
        for is_right in order.sample([True, False], 2):
            guess = request(
                "guess",
                secret if is_right else other,
                1,
                tenant="attacker",
                namespace=spaces["attacker"],
                base_prompt=base,
            )
            answer = ask(engine, guess)
            if trial >= 0:
                seconds[is_right].append(answer.ttft)
                max_cached = max(max_cached, answer.cached_tokens - sizes.base)
    right, wrong = sorted(seconds[True]), sorted(seconds[False])
    return Row(
        isolation=isolation,
        auc=auc(right, wrong),
        error=((2 * trials + 1) / (12 * trials * trials)) ** 0.5,
        median_right=right[trials // 2],
        median_wrong=wrong[trials // 2],
        max_cached_private=max_cached,
    )


def auc(smaller: list[float], larger: list[float]) -> float:
    """The share of pairs in which the first is smaller; a tie counts half (Mann-Whitney)."""
    wins = sum((a < b) + (a == b) / 2 for a, b in product(smaller, larger))
    return wins / (len(smaller) * len(larger))


if __name__ == "__main__":
    main()

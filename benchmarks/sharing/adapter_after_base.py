"""An activated adapter after the base model, on the same prompt: what is reused, and how exactly.

    python benchmarks/sharing/adapter_after_base.py MODEL [--threads N] [--save FILE]

For each length the base model answers a prompt, and then an adapter does, which acts from the
prompt's last eight tokens on. `hit rate` is the share of the prompt that the adapter took from the
base model's blocks; `TTFT cold` is the same request of a tenant with nothing in the cache. In
float32, so that both answers can be compared: the same greedy tokens, and the largest difference of
their log-probabilities.
"""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from asking import Answer, ask, make_activated, register
from driver import open_engine, parser, random_prompt, request, save, show

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import GenerateRequest

LENGTHS, QUICK_LENGTHS = (256, 1024, 4096, 16384), (32, 64)
NUM_OUTPUTS = 8
INVOCATION = [7, 8]
TAIL = 8  # tokens from the activation point to the prompt's end
RANK = 16


@dataclass(frozen=True)
class Row:
    prompt: int  # tokens
    hit_rate: float
    ttft_cold: float  # seconds
    ttft: float
    same_tokens: bool
    max_difference: float  # of log-probabilities


def main() -> None:
    options = parser(__doc__).parse_args()
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    settings = {"dtype": "float32", "max_model_len": max(lengths) + NUM_OUTPUTS}
    with tempfile.TemporaryDirectory() as folder, open_engine(options, **settings) as engine:
        (adapter,) = make_activated(options.model, Path(folder), 1, RANK, INVOCATION)
        ref = register(engine, adapter)
        compare(engine, ref, min(lengths), seed=0)  # warms up
        rows = [compare(engine, ref, length, seed=length) for length in lengths]
    show(
        ["prompt", "hit rate", "TTFT cold", "TTFT after base", "ratio", "tokens", "difference"],
        [
            [
                row.prompt,
                f"{row.hit_rate:.1%}",
                f"{row.ttft_cold * 1e3:.0f} ms",
                f"{row.ttft * 1e3:.0f} ms",
                f"{row.ttft_cold / row.ttft:.1f}",
                "equal" if row.same_tokens else "DIFFERENT",
                f"{row.max_difference:.1e}",
            ]
            for row in rows
        ],
    )
    save(options, "adapter_after_base", [asdict(row) for row in rows])


def compare(engine: LLMEngine, ref: AdapterRef, length: int, seed: int) -> Row:
    tail = [*INVOCATION, *random_prompt(engine, TAIL - len(INVOCATION), seed + 1)]
    prompt = [*random_prompt(engine, length - TAIL, seed), *tail]
    cold = ask(engine, with_logprobs(request("cold", prompt, NUM_OUTPUTS, tenant="b", adapter=ref)))
    ask(engine, request("base", prompt, 1, tenant="a"))
    warm = ask(engine, with_logprobs(request("warm", prompt, NUM_OUTPUTS, tenant="a", adapter=ref)))
    return Row(
        prompt=length,
        hit_rate=warm.cached_tokens / length,
        ttft_cold=cold.ttft,
        ttft=warm.ttft,
        same_tokens=cold.token_ids == warm.token_ids,
        max_difference=difference(cold, warm),
    )


def with_logprobs(item: GenerateRequest) -> GenerateRequest:
    sampling = msgspec.structs.replace(item.sampling, logprobs=1)
    return msgspec.structs.replace(item, sampling=sampling)


def difference(one: Answer, other: Answer) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


if __name__ == "__main__":
    main()

"""Load for any OpenAI-compatible server: streamed completions, one JSON line of what they took.

    python benchmarks/serving/load.py --url http://127.0.0.1:8000/v1 --key KEY --models base,a000 \
        --requests 32 --concurrency 8 --shared 256 --unique 64 --output 64

Every request has the same length: `shared` token ids that all begin with, `unique` ones of its
own, and exactly `output` generated tokens, greedy. So every server does the same work. Throughput
is output tokens over the whole run, prefill included; times are in milliseconds.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop
from exchange import post

JSON = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    label: str
    models: tuple[str, ...]
    requests: int = 32
    concurrency: int = 8
    shared: int = 256  # prompt tokens that all requests begin with
    unique: int = 64  # prompt tokens of each request's own
    output: int = 64
    spread: str = "even"  # even: the models in turn; zipf: the k-th model with weight 1/k
    vocab: int = 32000  # prompt token ids are drawn below this
    seed: int = 0

    @property
    def prompt(self) -> int:
        return self.shared + self.unique

    def bodies(self) -> list[JSON]:
        """One completion request each; the same for the same workload."""
        rng = random.Random(self.seed)
        shared = self._token_ids(rng, self.shared)
        return [
            {
                "model": self._model(rng, index),
                "prompt": shared + self._token_ids(rng, self.unique),
                "max_tokens": self.output,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for index in range(self.requests)
        ]

    def _token_ids(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(10, self.vocab) for _ in range(count)]

    def _model(self, rng: random.Random, index: int) -> str:
        if self.spread == "even":
            return self.models[index % len(self.models)]
        return rng.choices(self.models, [1 / (k + 1) for k in range(len(self.models))])[0]


@dataclass
class Tally:
    """What the requests of one run took, in seconds and tokens."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    completed: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    errors: list[str] = field(default_factory=list)


class Stopwatch:
    """Notes when each piece of one answer came."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._last = self._start = time.perf_counter()
        self.usage: JSON = {}

    def note(self, event: JSON) -> None:
        """Raises ValueError for an event that is an error."""
        if "error" in event:
            raise ValueError(json.dumps(event["error"]))
        if event.get("choices"):
            now = time.perf_counter()
            is_first = self._last == self._start
            (self._tally.first_tokens if is_first else self._tally.gaps).append(now - self._last)
            self._last = now
        self.usage = event.get("usage") or self.usage


async def complete(url: str, key: str, workload: Workload, body: JSON, tally: Tally) -> None:
    watch = Stopwatch(tally)
    await post(f"{url}/completions", key, body, watch.note)
    check_usage(workload, watch.usage)
    tally.completed += 1
    tally.tokens += watch.usage["completion_tokens"]
    details = watch.usage.get("prompt_tokens_details") or {}
    tally.cached_tokens += details.get("cached_tokens") or 0


def check_usage(workload: Workload, usage: JSON) -> None:
    """A server that counts other tokens than it was asked for did other work."""
    counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if counted != (workload.prompt, workload.output):
        raise ValueError(f"asked for {(workload.prompt, workload.output)} tokens, got {counted}")


async def drive(
    workload: Workload, url: str, key: str, worded: Callable[[JSON], JSON]
) -> tuple[Tally, float]:
    """Keeps `concurrency` requests in flight; -> what they took, wall seconds of the whole."""
    tally = Tally()
    gate = asyncio.Semaphore(workload.concurrency)

    async def one(body: JSON) -> None:
        async with gate:
            try:
                await complete(url, key, workload, body, tally)
            except (OSError, ValueError) as error:
                tally.errors.append(f"{type(error).__name__}: {error}"[:200])

    bodies = [worded(body) for body in workload.bodies()]
    start = time.perf_counter()
    await asyncio.gather(*(one(body) for body in bodies))
    return tally, time.perf_counter() - start


def measure(
    workload: Workload,
    url: str,
    key: str = "",
    worded: Callable[[JSON], JSON] = lambda body: body,
) -> JSON:
    """Runs the workload against the server at `url` (…/v1) and sums it up in one flat record.

    `worded` puts a request into the words of a server that has its own.
    """
    tally, wall = uvloop.run(drive(workload, url, key, worded))
    return {
        "label": workload.label,
        "models": len(workload.models),
        "requests": workload.requests,
        "concurrency": workload.concurrency,
        "prompt": workload.prompt,
        "shared": workload.shared,
        "output": workload.output,
        "wall_s": round(wall, 2),
        "output_tok_s": round(tally.tokens / wall, 1),
        "req_s": round(tally.completed / wall, 2),
        "ttft_p50_ms": milliseconds(percentile(tally.first_tokens, 0.5)),
        "ttft_p95_ms": milliseconds(percentile(tally.first_tokens, 0.95)),
        "itl_mean_ms": milliseconds(statistics.fmean(tally.gaps) if tally.gaps else None),
        "itl_p95_ms": milliseconds(percentile(tally.gaps, 0.95)),
        "cached_tokens": tally.cached_tokens,
        "errors": len(tally.errors),
        "first_error": tally.errors[:1],
    }


def percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def main() -> None:
    defaults = asdict(Workload(label="", models=("base",)))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="the API's address, with /v1")
    parser.add_argument("--key", default="", help="API key")
    parser.add_argument("--models", default="base", help="comma-separated model names")
    parser.add_argument("--spread", choices=("even", "zipf"), default="even")
    parser.add_argument("--label", default="")
    for name in ("requests", "concurrency", "shared", "unique", "output", "vocab", "seed"):
        parser.add_argument(f"--{name}", type=int, default=defaults[name])
    options = vars(parser.parse_args())
    url, key = options.pop("url"), options.pop("key")
    models = tuple(options.pop("models").split(","))
    print(json.dumps(measure(Workload(models=models, **options), url, key)))


if __name__ == "__main__":
    main()

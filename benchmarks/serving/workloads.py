"""The workloads, each the same for every server."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from load import Workload

ADAPTERS = 16
NAMES = tuple(f"a{index:03d}" for index in range(ADAPTERS))
NINE = ("base", *NAMES[:8])
ALL = ("base", *NAMES)
PREFIX = {"requests": 16, "shared": 1024, "unique": 32, "output": 16}
LONG = {"requests": 3, "concurrency": 1, "shared": 0, "unique": 1056, "output": 2}

WARM_UP = Workload("warm-up", ALL, len(ALL), concurrency=4, shared=16, output=4, seed=99)
WORKLOADS = (
    Workload("base c1", ("base",), requests=4, concurrency=1, seed=1),
    Workload("base c8", ("base",), requests=24, seed=2),
    Workload("one adapter c8", NAMES[:1], requests=24, seed=3),
    Workload("base + 8 adapters c8", NINE, requests=27, seed=4),
    Workload("base + 16 adapters c16", ALL, requests=34, concurrency=16, seed=5),
    Workload("prefix-heavy base c8", ("base",), **PREFIX, seed=10),
    Workload("prefix-heavy base + 8 adapters c8", NINE, **PREFIX, seed=20),
    Workload("first token base", ("base",), **LONG, seed=30),
    Workload("first token adapter", NAMES[:1], **LONG, seed=31),
)


def quick(workload: Workload) -> Workload:
    """Proves that everything runs; its numbers mean nothing."""
    models = len(workload.models)
    return replace(workload, requests=min(models, 4), shared=32, unique=5, output=4)


def choose(cases: Iterable[str], served: set[str]) -> list[Workload]:
    """The warm-up, and the workloads whose label holds one of the texts; only served models."""
    warm_up = replace(WARM_UP, models=tuple(name for name in ALL if name in served))
    chosen = [w for w in WORKLOADS if any(text in w.label for text in cases)]
    return [warm_up, *(w for w in chosen if served.issuperset(w.models))]


def sized_for(model: Path, workloads: list[Workload]) -> list[Workload]:
    """With prompts of token ids that the model has."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    return [replace(workload, vocab=min(workload.vocab, vocab)) for workload in workloads]

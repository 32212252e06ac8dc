"""An error of one request's own values ends that request alone, and changes no bit of the others.

Values that raise are refused when a request comes; here they are put in afterwards, as a fault of
ours would.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.engine.engines import Choice, drain, make_engine, request, run
from support.models.architectures import write_checkpoint

from loraplex.engine.errors import INTERNAL_ERROR
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import FailureCode, RequestFailed, TokenEvent
from loraplex.engine.sequence import Sequence

BEYOND = 10**6  # no token of the model
OTHERS = {
    "greedy": {"logprobs": 3},
    "drawn": {"temperature": 0.9, "seed": 7, "logprobs": 2, "n": 2},
    "biased": {"logit_bias": {5: 2.0}, "logprobs": 1},
}

Poison = Callable[[Sequence], None]


def in_its_bias(sequence: Sequence) -> None:
    sequence.sampling = msgspec.structs.replace(sequence.sampling, logit_bias={BEYOND: 1.0})


def in_its_draw(sequence: Sequence) -> None:
    sequence.sampling = msgspec.structs.replace(sequence.sampling, temperature=1.0)
    sequence.seed = "no number"  # type: ignore[assignment]


def in_its_text(sequence: Sequence) -> None:
    sequence.detokenizer = None  # type: ignore[assignment]


def in_its_events(sequence: Sequence) -> None:
    sequence.prompt_logprobs = ["no log-probability"]  # type: ignore[list-item]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    folder = tmp_path_factory.mktemp("base")
    return make_engine(write_checkpoint(folder, "llama"), folder / "store")


def answers(engine: LLMEngine, poison: Poison | None) -> tuple[dict[str, Any], list[RequestFailed]]:
    """The answers of the other requests, and the failures."""
    results = {name: [Choice() for _ in range(int(o.get("n", 1)))] for name, o in OTHERS.items()}
    for number, (name, options) in enumerate(OTHERS.items()):
        engine.add(request([1, 2, 3 + number], name, **options))
    if poison is not None:
        engine.add(request([4, 5, 6], "poisoned"))
        poison(next(it for it in engine._scheduler.waiting if it.request_id == "poisoned"))
    failures = []
    for event in drain(engine):
        if isinstance(event, RequestFailed):
            failures.append(event)
        elif isinstance(event, TokenEvent) and event.request_id != "poisoned":
            results[event.request_id][event.index].add(event)
    return results, failures


@pytest.mark.parametrize("poison", [in_its_bias, in_its_draw, in_its_text, in_its_events])
def test_a_request_that_raises_ends_alone(engine: LLMEngine, poison: Poison) -> None:
    alone, _ = answers(engine, None)
    beside, failures = answers(engine, poison)

    assert beside == alone
    assert [(it.request_id, it.code, it.message) for it in failures] == [
        ("poisoned", FailureCode.INTERNAL, INTERNAL_ERROR)
    ]


@pytest.mark.parametrize("poison", [in_its_bias, in_its_draw, in_its_text, in_its_events])
def test_the_books_balance_after_a_request_that_raised(engine: LLMEngine, poison: Poison) -> None:
    answers(engine, poison)

    engine._scheduler.kv.check_integrity()
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert run(engine, [request([7, 8, 9], "again")])["again"][0].finish_reason is not None

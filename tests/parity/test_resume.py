"""A request that goes on in another engine says what it would have said in the first, from
whatever token on, and is billed for it once."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.alike import assert_alike
from support.engine.engines import Choice, drain, make_engine, publish, register, request
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import VOCAB_SIZE, write_checkpoint

from loraplex.adapters.manifest import Activation, AdapterRef
from loraplex.engine.errors import RequestRejected
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    BasePromptRef,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Resume,
    TokenEvent,
)

pytestmark = [*PEFT_NOISE, pytest.mark.device]

NUM_TOKENS = 14
INVOCATION = [50, 60]
PROMPT = [(7 * i + 3) % (VOCAB_SIZE - 3) + 3 for i in range(21)]
INVOKING = [*PROMPT[:9], *INVOCATION, *PROMPT[9:]]
SAMPLED = {"temperature": 1.0, "seed": 11}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {**SAMPLED, "top_p": 0.9, "logit_bias": {5: 2.0}},
    "penalties": {**SAMPLED, **PENALTIES},
    "two choices": {**SAMPLED, "n": 2},
    "a minimum of tokens": {**SAMPLED, "min_tokens": 9, "ignore_eos": False},
    "logprobs": {**SAMPLED, "logprobs": 2},
    "prompt logprobs": {**SAMPLED, "logprobs": 1, "prompt_logprobs": 1, "n": 2},
    "an adapter": {**SAMPLED, "adapter": "always"},
    "an activated adapter": {**SAMPLED, "adapter": "activated", "prompt": INVOKING},
    "a base prompt": {**SAMPLED, "base_prompt": True},
    "an adapter behind a base prompt": {**SAMPLED, "adapter": "behind", "base_prompt": True},
}


@dataclass
class Party:
    """One engine with its adapters and base prompt."""

    engine: LLMEngine
    adapters: dict[str, AdapterRef]
    base_prompt: BasePromptRef

    def request(
        self,
        *,
        prompt: list[int] = PROMPT,
        adapter: str | None = None,
        base_prompt: bool = False,
        **options: Any,
    ) -> GenerateRequest:
        return request(
            prompt,
            adapter=None if adapter is None else self.adapters[adapter],
            base_prompt=self.base_prompt if base_prompt else None,
            **{"max_tokens": NUM_TOKENS} | options,
        )

    def run(self, item: GenerateRequest) -> list[list[TokenEvent]]:
        """The events of each choice."""
        choices: list[list[TokenEvent]] = [[] for _ in range(item.sampling.n)]
        self.engine.add(item)
        for event in drain(self.engine):
            assert isinstance(event, TokenEvent), event
            choices[event.index].append(event)
        return choices


@pytest.fixture(scope="module", params=["gemma3_text"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), request.param)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        return {
            "always": write_adapter(base, parent / "always", 1, r=4, target_modules="all-linear"),
            "activated": write_adapter(
                base,
                parent / "activated",
                2,
                r=4,
                target_modules=["q_proj", "k_proj", "v_proj"],
                alora_invocation_tokens=INVOCATION,
            ),
            "behind": write_adapter(base, parent / "behind", 3, r=4, target_modules=["v_proj"]),
        }


def party(base: Path, folders: dict[str, Path], store: Path) -> Party:
    engine = make_engine(base, store)
    refs = {
        name: register(
            engine, folder, activation=Activation.AFTER_PROMPT if name == "behind" else None
        ).ref
        for name, folder in folders.items()
    }
    return Party(engine, refs, publish(engine, PROMPT[:6]))


@pytest.fixture(scope="module")
def first(
    base: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Party]:
    whole = party(base, folders, tmp_path_factory.mktemp("first"))
    yield whole
    whole.engine.close()


@pytest.fixture(scope="module")
def second(
    base: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Party]:
    other = party(base, folders, tmp_path_factory.mktemp("second"))
    yield other
    other.engine.close()


def cut(item: GenerateRequest, events: list[list[TokenEvent]], num_tokens: int) -> GenerateRequest:
    """The request as it is sent again when so many tokens of each choice have come."""
    known = [
        None if len(choice) <= num_tokens else [t for e in choice[:num_tokens] for t in e.token_ids]
        for choice in events
    ]
    cached = events[0][0].cached_tokens
    assert cached is not None
    return msgspec.structs.replace(item, resume=Resume(choices=known, cached_tokens=cached))


def assert_goes_on(first: Party, second: Party, options: dict[str, Any]) -> list[list[TokenEvent]]:
    item = first.request(**options)
    whole = first.run(item)
    for num_tokens in range(1, max(map(len, whole))):
        rest = second.run(cut(item, whole, num_tokens))

        for new, old in zip(rest, whole, strict=True):
            assert list(map(plain, new)) == list(map(plain, old[num_tokens:])), num_tokens
            if new:
                assert_alike(summary(new), summary(old[num_tokens:]))
    return whole


def plain(event: TokenEvent) -> TokenEvent:
    """Without log-probabilities, whose last digits depend on what else is computed."""
    assert event.prompt_logprobs is None or event.cached_tokens is not None, "told again"
    return msgspec.structs.replace(event, logprobs=None)


def summary(events: list[TokenEvent]) -> Choice:
    choice = Choice()
    for event in events:
        choice.add(event)
    return choice


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_any_token_on(first: Party, second: Party, kind: str) -> None:
    whole = assert_goes_on(first, second, KINDS[kind])

    assert all(choice[-1].finish_reason is not None for choice in whole)
    assert all(len(choice) >= 9 for choice in whole)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_the_cut(first: Party, second: Party, include: bool) -> None:
    text = "".join(event.text for event in first.run(first.request(**SAMPLED))[0])
    middle = len(text) * 2 // 3
    options = {**SAMPLED, "stop": (text[middle - 6 : middle],)}

    whole = assert_goes_on(first, second, {**options, "include_stop_str_in_output": include})

    assert whole[0][-1].finish_reason is FinishReason.STOP
    assert len(whole[0]) > 3


def test_choices_that_end_at_different_tokens_go_on_without_the_ended_ones(
    first: Party, second: Party
) -> None:
    options = {**SAMPLED, "n": 3}
    tokens = [[e.token_ids[0] for e in choice] for choice in first.run(first.request(**options))]
    early = next(token for token in tokens[1][3:] if token not in tokens[0] + tokens[2])

    whole = assert_goes_on(first, second, {**options, "stop_token_ids": (early,)})

    assert len(whole[1]) < len(whole[0]) == len(whole[2])


def test_usage_is_that_of_one_request_and_its_first_admission(first: Party, second: Party) -> None:
    first.run(first.request())  # it is cached from now on
    item = first.request()
    whole = first.run(item)

    (rest,) = second.run(cut(item, whole, 5))

    usage = rest[-1].usage
    assert usage is not None
    assert usage.cached_tokens > 0
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), NUM_TOKENS)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([], "of each choice"),
        ([[5], [6]], "of each choice"),
        ([None], "one at least"),
        ([[]], "one token at least"),
        ([[VOCAB_SIZE]], f"between 0 and {VOCAB_SIZE - 1}"),
        ([[-1]], "between 0"),
        ([[5] * NUM_TOKENS], "which has ended"),
        ([[5] * (NUM_TOKENS + 1)], "behind the end"),
    ],
)
def test_what_cannot_be_the_requests_tokens_is_refused(
    second: Party, choices: list[list[int] | None], said: str
) -> None:
    resume = Resume(choices=choices, cached_tokens=0)

    with pytest.raises(RequestRejected, match=said) as caught:
        second.engine.add(msgspec.structs.replace(second.request(), resume=resume))

    assert (caught.value.code, caught.value.param) == (FailureCode.INVALID_REQUEST, "resume")
    assert not second.engine.has_work

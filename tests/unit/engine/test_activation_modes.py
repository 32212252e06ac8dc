"""An adapter's activation is chosen when it is registered, shown, and never changed silently."""

from pathlib import Path

import pytest
from support.engine.engines import (
    drain,
    publish,
    register,
    request,
    run,
    run_one,
    try_register,
)
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import write_checkpoint

from loraplex.adapters.manifest import Activation
from loraplex.engine.errors import RequestRejected
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    AdapterRegistered,
    BasePromptRef,
    FailureCode,
    RequestFailed,
    UnregisterAdapter,
)

pytestmark = PEFT_NOISE

PROMPT = [(7 * i + 3) % 300 + 3 for i in range(22)]
REST = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(model, tmp_path_factory.mktemp("a") / "plain", target_modules="all-linear")


@pytest.fixture(scope="module")
def activated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a") / "activated"
    config = {"target_modules": "all-linear", "alora_invocation_tokens": [5, 6]}
    return write_adapter(model, folder, **config)


def test_by_default_an_adapter_acts_as_it_was_trained(
    engine: LLMEngine, plain: Path, activated: Path
) -> None:
    infos = [register(engine, folder) for folder in (plain, activated)]

    assert [info.activation for info in infos] == [Activation.ALWAYS, Activation.INVOCATION]


@pytest.mark.parametrize("mode", [Activation.ALWAYS, Activation.AFTER_PROMPT])
def test_another_activation_is_taken_where_it_is_asked_for(
    engine: LLMEngine, activated: Path, mode: Activation
) -> None:
    assert register(engine, activated, activation=mode).activation is mode


def test_invocation_needs_invocation_tokens(engine: LLMEngine, plain: Path) -> None:
    outcome = try_register(engine, plain, activation=Activation.INVOCATION)

    assert isinstance(outcome, RequestFailed)
    assert outcome.code is FailureCode.ADAPTER_REJECTED


def test_a_registered_adapter_keeps_its_activation(engine: LLMEngine, plain: Path) -> None:
    register(engine, plain)

    again = try_register(engine, plain, activation=Activation.AFTER_PROMPT)

    assert isinstance(again, RequestFailed)
    assert "must be unregistered first" in again.message
    assert isinstance(try_register(engine, plain), AdapterRegistered)


def test_a_registered_adapter_keeps_its_base_prompt(engine: LLMEngine, plain: Path) -> None:
    one, other = (BasePromptRef(prompt_id="prompt", version=version) for version in (1, 2))
    info = register(engine, plain, base_prompt=one)

    again = try_register(engine, plain, base_prompt=other)

    assert info.base_prompt == one
    assert isinstance(again, RequestFailed)
    assert "unregister it first" in again.message


def test_once_unregistered_it_can_have_another_activation_and_base_prompt(
    engine: LLMEngine, plain: Path
) -> None:
    ref = register(engine, plain).ref
    engine.submit(UnregisterAdapter(request_id="bye", adapter=ref))
    drain(engine)

    prompt = BasePromptRef(prompt_id="prompt", version=1)
    info = register(engine, plain, activation=Activation.AFTER_PROMPT, base_prompt=prompt)

    assert (info.activation, info.base_prompt) == (Activation.AFTER_PROMPT, prompt)


def test_two_modes_of_one_content_share_its_slot_and_no_block_that_it_changed(
    engine: LLMEngine, plain: Path
) -> None:
    prompt = publish(engine, PROMPT)
    always = register(engine, plain, adapter_id="always").ref
    after = register(engine, plain, adapter_id="after", activation=Activation.AFTER_PROMPT).ref
    tokens = [*PROMPT, *REST, *REST]

    answers = run(
        engine,
        [request(tokens, name, adapter=ref) for name, ref in (("one", always), ("two", after))],
    )
    again = [run_one(engine, request(tokens, adapter=ref)) for ref in (always, after)]
    base = run_one(engine, request(REST, base_prompt=prompt))

    assert engine.stats().adapters.resident == 1
    assert answers["one"][0].token_ids != answers["two"][0].token_ids
    assert [answer.token_ids for answer in again] == [
        answers[name][0].token_ids for name in ("one", "two")
    ]
    used = [choice.usage.cached_tokens for choice in (*again, base) if choice.usage]
    assert used == [28, 28, 22]
    first = [answers[name][0].usage for name in ("one", "two")]
    assert [usage.cached_tokens for usage in first if usage] == [0, 22]


def test_an_adapter_whose_own_base_prompt_is_not_published_is_not_served_without(
    engine: LLMEngine, plain: Path
) -> None:
    missing = BasePromptRef(prompt_id="prompt", version=1)
    ref = register(engine, plain, base_prompt=missing).ref

    with pytest.raises(RequestRejected) as refusal:
        engine.add(request(REST, adapter=ref))

    assert refusal.value.code is FailureCode.BASE_PROMPT_NOT_FOUND


def test_an_adapters_base_prompt_is_not_put_before_a_prompt_that_begins_with_it(
    engine: LLMEngine, plain: Path
) -> None:
    ref = register(engine, plain, base_prompt=publish(engine, PROMPT)).ref

    answers = [run_one(engine, request(tokens, adapter=ref)) for tokens in (REST, [*PROMPT, *REST])]

    assert [answer.usage.prompt_tokens for answer in answers if answer.usage] == [27, 27]
    assert answers[0].token_ids == answers[1].token_ids

"""Sampling parameters that make no sense cannot exist, and all faults are told at once."""

from typing import Any

import msgspec
import pytest

from loraplex.engine.sampling_params import (
    MAX_COUNT,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS_NAMED,
    InvalidSamplingParams,
    SamplingParams,
)

NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**400


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 129, HUGE]),
        ("max_tokens", [0, -1, MAX_COUNT + 1, HUGE]),
        ("min_tokens", [-1, HUGE]),
        ("temperature", [-0.1, 2.1, NAN, INFINITY, HUGE]),
        ("top_p", [0.0, -0.5, 1.01, NAN, HUGE]),
        ("top_k", [-2, HUGE]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0.0, -1.0, NAN, INFINITY, HUGE]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("seed", [MAX_SEED + 1, -MAX_SEED - 2]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("logit_bias", [{-1: 0.0}, {0: 100.1}, {0: NAN}, {HUGE: 0.0}, {0: HUGE}]),
        ("logit_bias", [dict.fromkeys(range(MAX_TOKENS_NAMED + 1), 1.0)]),
        ("stop", [("",), ("x" * (MAX_STOP_LENGTH + 1),), ("x",) * (MAX_STOPS + 1)]),
        ("stop_token_ids", [(-1,), (HUGE,), tuple(range(MAX_TOKENS_NAMED + 1))]),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidSamplingParams) as refusal:
            SamplingParams(**{name: value})
        assert {parameter for parameter, _ in refusal.value.faults} == {name}


@pytest.mark.parametrize(
    "values",
    [
        {"n": 128, "max_tokens": MAX_COUNT, "min_tokens": 0, "top_k": -1, "top_p": 1e-9},
        {"temperature": 0.0, "min_p": 1.0, "repetition_penalty": 1e-9},
        {"temperature": 2.0, "frequency_penalty": -2.0, "presence_penalty": 2.0},
        {"seed": -MAX_SEED - 1, "logprobs": 20, "prompt_logprobs": 0},
        {"logit_bias": {0: -100, MAX_COUNT: 100}, "stop": ("x",) * MAX_STOPS},
        {"min_tokens": 5, "max_tokens": 5},
    ],
)
def test_the_borders_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)

    assert {name: getattr(params, name) for name in values} == values


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidSamplingParams) as refusal:
        SamplingParams(n=0, temperature=3.0, top_p=0.0, min_tokens=9, max_tokens=3, stop=("",))

    named = [name for name, _ in refusal.value.faults]
    assert named == ["n", "temperature", "top_p", "min_tokens", "stop"]
    assert all(f"{name}" in str(refusal.value) for name in named)


def test_a_fault_names_the_value_and_what_is_allowed() -> None:
    with pytest.raises(InvalidSamplingParams) as refusal:
        SamplingParams(temperature=2.5)

    assert str(refusal.value) == "temperature must be between 0.0 and 2.0, got 2.5"


def test_a_message_from_the_wire_is_checked_like_any_other() -> None:
    message = msgspec.msgpack.encode({"temperature": 3.0})

    with pytest.raises(msgspec.ValidationError, match="temperature must be between"):
        msgspec.msgpack.decode(message, type=SamplingParams)


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(stop=("a", "b"), logit_bias={5: -1.5}, seed=-7, stop_token_ids=(1, 2))

    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)

    assert copy == params


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-9, True), (1e-3, False)])
def test_the_lowest_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy

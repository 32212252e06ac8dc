"""From where an adapter acts on a prompt."""

import pytest

from loraplex.adapters.activation import NOWHERE, adapter_start
from loraplex.adapters.manifest import Activation


@pytest.mark.parametrize(
    ("prompt", "invocation", "start"),
    [
        ([5, 6, 7], None, 0),
        ([5, 6, 7], [6, 7], 1),
        ([6, 7, 5, 6, 7, 5], [6, 7], 3),
        ([6, 6, 6], [6, 6], 1),
        ([5, 6, 7], [5, 6, 7], 0),
        ([5, 6, 7], [7], 2),
        ([5, 6, 7], [6, 5], NOWHERE),
        ([5], [5, 6], NOWHERE),
    ],
)
def test_an_activated_adapter_acts_from_the_last_invocation_on(
    prompt: list[int], invocation: list[int] | None, start: int
) -> None:
    activation = Activation.INVOCATION if invocation else Activation.ALWAYS

    assert adapter_start(prompt, activation, invocation) == start


@pytest.mark.parametrize(("num_base_tokens", "start"), [(0, 0), (2, 2), (3, 3)])
def test_an_adapter_after_the_prompt_acts_from_the_end_of_the_base_prompt_on(
    num_base_tokens: int, start: int
) -> None:
    prompt = [5, 6, 7]

    found = adapter_start(
        prompt, Activation.AFTER_PROMPT, invocation=[6], num_base_tokens=num_base_tokens
    )

    assert found == start

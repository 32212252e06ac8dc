"""From where an adapter acts on a prompt."""

import pytest

from loraplex.engine.activation import NOWHERE, adapter_start


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
    assert adapter_start(prompt, invocation) == start

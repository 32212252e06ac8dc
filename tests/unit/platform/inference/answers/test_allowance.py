"""An answer that is sent whole has a largest size."""

import pytest

from loraplex.engine.protocol import PositionLogprobs, TokenEvent, TokenLogprob
from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.answers.allowance import LogprobAllowance


def event(num_positions: int, num_alternatives: int) -> TokenEvent:
    token = TokenLogprob(token_id=1, logprob=0.0, text="a", bytes=[97], rank=1)
    positions = [PositionLogprobs(token, [token] * num_alternatives)] * num_positions
    return TokenEvent(request_id="r", index=0, token_ids=[1], text="a", logprobs=positions)


def test_the_chosen_and_the_alternatives_of_all_events_count() -> None:
    allowance = LogprobAllowance(max_logprobs=12)

    allowance.take(event(num_positions=2, num_alternatives=3))
    allowance.take(event(num_positions=2, num_alternatives=1))
    with pytest.raises(InvalidRequest, match="more than 12"):
        allowance.take(event(num_positions=1, num_alternatives=0))

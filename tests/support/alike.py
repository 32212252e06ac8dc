"""What two answers must have in common."""

import pytest
from support.engine.engines import Choice


def assert_alike(given: Choice, expected: Choice) -> None:
    """All that a caller sees is equal, log-probabilities as far as the order of sums allows."""
    assert (given.token_ids, given.text) == (expected.token_ids, expected.text)
    ends = [(c.finish_reason, c.stop_reason) for c in (given, expected)]
    assert ends[0] == ends[1]
    assert given.usage is not None
    assert expected.usage is not None
    assert given.usage.completion_tokens == expected.usage.completion_tokens
    for ours, theirs in (
        (given.logprobs, expected.logprobs),
        (given.prompt_logprobs or [], expected.prompt_logprobs or []),
    ):
        assert [p and p.chosen.token_id for p in ours] == [p and p.chosen.token_id for p in theirs]
        assert [p.chosen.logprob for p in ours if p] == pytest.approx(
            [p.chosen.logprob for p in theirs if p], abs=2e-4
        )

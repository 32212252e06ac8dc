"""What two answers must have in common."""

from support.engine.engines import Choice


def assert_alike(given: Choice, expected: Choice) -> None:
    """All that a caller sees is equal, log-probabilities to the bit."""
    assert (given.token_ids, given.text) == (expected.token_ids, expected.text)
    ends = [(c.finish_reason, c.stop_reason) for c in (given, expected)]
    assert ends[0] == ends[1]
    assert given.usage is not None
    assert expected.usage is not None
    assert given.usage.completion_tokens == expected.usage.completion_tokens
    assert given.logprobs == expected.logprobs
    assert given.prompt_logprobs == expected.prompt_logprobs

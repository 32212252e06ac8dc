"""AnswerOptions: what an answer shows beside its text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerOptions:
    usage_at_end: bool = False  # in a last chunk of a stream
    usage_in_chunks: bool = False  # so far, in each chunk of a stream
    token_ids: bool = False  # of prompt and answer
    tokens_as_ids: bool = False  # in log-probabilities, instead of their texts
    echo: bool = False  # the prompt comes first

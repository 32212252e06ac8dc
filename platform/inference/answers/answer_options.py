"""AnswerOptions: what a caller wants to see of an answer beside its text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerOptions:
    usage_at_end: bool = False  # of a stream, in a last chunk
    usage_in_chunks: bool = False  # of a stream, so far, in each chunk
    token_ids: bool = False  # of prompt and answer
    tokens_as_ids: bool = False  # in log-probabilities, in place of their texts
    echo: bool = False  # the prompt comes first

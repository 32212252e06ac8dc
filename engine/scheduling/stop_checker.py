"""StopChecker: decides whether a new token ends its sequence, and which text it adds."""

from loraplex.engine.protocol import FinishReason
from loraplex.engine.sampling_params import MAX_COUNT
from loraplex.engine.sequence import Sequence


class TextFailed(Exception):
    """A token of one sequence cannot be turned into text."""


class StopChecker:
    """Knows the model's end-of-sequence tokens; all other stops belong to the sequence."""

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int = MAX_COUNT) -> None:
        """`vocab_size`: tokens that have a logit; a tokenizer or a config may name more."""
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)

    def ending_token_ids(self, sequence: Sequence) -> frozenset[int]:
        """Returns the tokens that end this sequence; none is sampled before `min_tokens`."""
        eos = frozenset() if sequence.sampling.ignore_eos else self.eos_token_ids
        by_text = (token for token in sequence.detokenizer.stop_tokens if token < self.vocab_size)
        return eos.union(sequence.sampling.stop_token_ids, by_text)

    def check(self, sequence: Sequence) -> str:
        """Checks the sequence's last token and finishes the sequence if that token ends it.

        Returns:
            the text that can be given out now; all that is left if the sequence has finished.

        Raises:
            TextFailed: for any error of this sequence's own text.
        """
        try:
            return self._check(sequence)
        except Exception as error:
            raise TextFailed from error

    def _check(self, sequence: Sequence) -> str:
        token = sequence.token_ids[-1]
        if token in self.ending_token_ids(sequence):
            stop = sequence.detokenizer.stop_tokens.get(token)
            is_eos = token in self.eos_token_ids
            sequence.finish(FinishReason.STOP, stop or (None if is_eos else token))
            is_shown = stop is not None and sequence.sampling.include_stop_str_in_output
            return sequence.detokenizer.flush() + (stop if stop and is_shown else "")
        sequence.detokenizer.add(token)
        if sequence.num_output_tokens >= sequence.sampling.min_tokens:
            stop = sequence.detokenizer.find_stop()
            if stop is not None:
                sequence.finish(FinishReason.STOP, stop)
                return sequence.detokenizer.flush()
        if self._is_at_limit(sequence):
            sequence.finish(FinishReason.LENGTH)
            return sequence.detokenizer.flush()
        return sequence.detokenizer.take()

    def _is_at_limit(self, sequence: Sequence) -> bool:
        limit = sequence.sampling.max_tokens
        reached = limit is not None and sequence.num_output_tokens >= limit
        return reached or sequence.num_tokens >= sequence.max_len

"""StepPlan: what one step computes, and what it can still take."""

from loraplex.engine.sequence import Sequence


class StepPlan:
    """Hands out a step's tokens, and among them the prompt positions whose logits are wanted.

    Attributes:
        num_tokens: that are still to be had.
        num_rows: sequences, forks counted, that may still begin.
        num_drafts: that may still be added.
        granted: tokens per sequence, in the order in which they were granted.
        coming: keys of the blocks that become full in this step.
    """

    def __init__(
        self, num_tokens: int, num_logits_rows: int, num_rows: int, num_drafts: int = 0
    ) -> None:
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        self.num_drafts = num_drafts
        self.granted: dict[Sequence, int] = {}
        self.coming: set[bytes] = set()
        self._num_logits_rows = num_logits_rows

    @property
    def unfinished(self) -> list[Sequence]:
        """Returns the sequences whose input was not granted in full."""
        return [s for s, granted in self.granted.items() if granted < s.num_uncomputed_tokens]

    def offer(self, sequence: Sequence) -> int:
        """Returns the tokens that the sequence may have in all, those already granted included.

        At least one, even if all logits rows are spent: no sequence stands still.
        """
        granted = self.granted.get(sequence, 0)
        more = min(sequence.num_uncomputed_tokens - granted, self.num_tokens)
        if sequence.owes_prompt_logprobs:
            more = min(more, max(1 - granted, self._num_logits_rows))
        return granted + more

    def grant(self, sequence: Sequence, num_tokens: int) -> int:
        """Grants so many tokens in all; returns the increase."""
        more = num_tokens - self.granted.get(sequence, 0)
        self.granted[sequence] = num_tokens
        self.num_tokens -= more
        if sequence.owes_prompt_logprobs:
            self._num_logits_rows -= more
        return more

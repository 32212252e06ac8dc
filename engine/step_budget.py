"""StepBudget: what one step may still compute."""

from loraplex.engine.sequence import Sequence


class StepBudget:
    """Tokens in all, and of these the prompt positions whose logits are wanted."""

    def __init__(self, num_tokens: int, num_logits_rows: int) -> None:
        self.num_tokens = num_tokens
        self._num_logits_rows = num_logits_rows

    def offer(self, sequence: Sequence, reserved: int = 0) -> int:
        """Tokens that the sequence may compute, while `reserved` are kept for others.

        One at least, even if all logits rows are spent: no sequence stands still.
        """
        num_tokens = min(sequence.num_uncomputed_tokens, self.num_tokens - reserved)
        if sequence.owes_prompt_logprobs:
            return min(num_tokens, max(1, self._num_logits_rows))
        return num_tokens

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens -= num_tokens
        if sequence.owes_prompt_logprobs:
            self._num_logits_rows -= num_tokens

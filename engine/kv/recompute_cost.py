"""RecomputeCost: the cost of computing a prompt's tokens, as measured in steps."""

MIN_TOKENS = 32  # of a step long enough to be measured
TOKENS_PER_SEQUENCE = 4  # at least: a decode step is bound by the weights, not by its tokens
ATTENTION_TOKENS = 32_768  # length of a prompt at which attention takes as long as all the rest
_WEIGHT = 0.2  # of the newest step in the running mean


class RecomputeCost:
    """Seconds per token of steps that mostly compute prompts: a running mean."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None  # None until such a step was measured

    def note(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Records one step: its tokens, its sequences and its wall time."""
        if num_tokens < max(MIN_TOKENS, TOKENS_PER_SEQUENCE * num_sequences):
            return
        measured = seconds / num_tokens
        if self.seconds_per_token is None:
            self.seconds_per_token = measured
        self.seconds_per_token += _WEIGHT * (measured - self.seconds_per_token)

    def seconds(self, num_tokens: float) -> float | None:
        """Returns the seconds that so many tokens would take; None until that is known."""
        return None if self.seconds_per_token is None else num_tokens * self.seconds_per_token


def cost_per_token(num_tokens: int) -> float:
    """Returns the cost of a token in a prompt of this length, relative to a token of a very short
    prompt: longer prompts attend to more."""
    return 1 + num_tokens / ATTENTION_TOKENS

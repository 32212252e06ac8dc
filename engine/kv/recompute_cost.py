"""RecomputeCost: what it costs to compute the tokens of a prompt, as measured in steps."""

MIN_TOKENS = 32  # of a step whose time says something
TOKENS_PER_SEQUENCE = 4  # at least: a decode step is bound by the weights, not by its tokens
ATTENTION_TOKENS = 32_768  # length of a prompt at which attention takes as long as all the rest
_WEIGHT = 0.2  # of the newest step in the running mean


class RecomputeCost:
    """Seconds per token of steps that mostly compute prompts: a running mean."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None  # None until such a step was measured

    def note(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Takes in one step: its tokens, of how many sequences, and its wall time."""
        if num_tokens < max(MIN_TOKENS, TOKENS_PER_SEQUENCE * num_sequences):
            return
        measured = seconds / num_tokens
        if self.seconds_per_token is None:
            self.seconds_per_token = measured
        self.seconds_per_token += _WEIGHT * (measured - self.seconds_per_token)

    def seconds(self, num_tokens: float) -> float | None:
        """What so many tokens would cost; None until it is known."""
        return None if self.seconds_per_token is None else num_tokens * self.seconds_per_token


def cost_per_token(num_tokens: int) -> float:
    """What a token of a prompt so long costs, where one of a very short prompt costs 1: longer ones
    attend to more."""
    return 1 + num_tokens / ATTENTION_TOKENS

"""Where an adapter begins to act on a prompt."""

NOWHERE = 2**31  # beyond every position


def adapter_start(prompt: list[int], invocation: list[int] | None) -> int:
    """The first position on which the adapter acts.

    An ordinary LoRA acts on every token. An activated LoRA (arXiv 2504.12397) acts from the last
    occurrence of its invocation tokens in the prompt on, and not at all without one; as in PEFT.
    """
    if invocation is None:
        return 0
    for start in range(len(prompt) - len(invocation), -1, -1):
        if prompt[start : start + len(invocation)] == invocation:
            return start
    return NOWHERE

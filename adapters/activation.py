"""Finds where an adapter begins to act on a prompt."""

from loraplex.adapters.manifest import Activation

NOWHERE = 2**31  # beyond every position


def adapter_start(
    prompt: list[int],
    activation: Activation,
    invocation: list[int] | None = None,
    num_base_tokens: int = 0,
) -> int:
    """Returns the first position on which the adapter acts.

    Args:
        prompt: all of it, a base prompt included.
        activation: `ALWAYS`: an ordinary LoRA acts on every token. `INVOCATION`: an activated LoRA
            (arXiv 2504.12397) acts from the last occurrence of its invocation tokens on, and not at
            all without one; as in PEFT. `AFTER_PROMPT`: it acts behind the base prompt, and on
            every token without one.
        invocation: the invocation tokens.
        num_base_tokens: the length of the base prompt that the prompt begins with.
    """
    if activation is Activation.ALWAYS:
        return 0
    if activation is Activation.AFTER_PROMPT:
        return num_base_tokens
    tokens = invocation or []
    for start in range(len(prompt) - len(tokens), -1, -1):
        if prompt[start : start + len(tokens)] == tokens:
            return start
    return NOWHERE

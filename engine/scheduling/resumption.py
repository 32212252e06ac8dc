"""Resumption: continues sequences begun by another engine as if they had been preempted here."""

from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import FailureCode, Resume
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.sequence import Sequence


def resume(
    sequence: Sequence, progress: Resume, stops: StopChecker, vocab_size: int
) -> list[Sequence]:
    """Appends the known tokens one by one, as if they had just been sampled, so that the
    detokenizer and the search for stop strings are in the state in which the other engine left
    them.

    Args:
        sequence: with the prompt alone; it is changed, and used up.

    Returns:
        one sequence for each choice that has not ended.

    Raises:
        RequestRejected: these cannot be the tokens of this request.
    """
    known = {i: tokens for i, tokens in enumerate(progress.choices) if tokens is not None}
    if len(progress.choices) != sequence.sampling.n or not known:
        raise _invalid("needs the tokens of each choice, of one at least that has not ended")
    if any(not tokens for tokens in known.values()):
        raise _invalid("needs one token at least of each choice that has not ended")
    if not all(0 <= token < vocab_size for tokens in known.values() for token in tokens):
        raise _invalid(f"takes token ids between 0 and {vocab_size - 1}")
    choices = []
    for index, tokens in known.items():
        choice = sequence.fork(index)
        choice.num_cached_tokens = progress.cached_tokens
        for token in tokens:
            if choice.finish_reason is not None:
                raise _invalid(f"has tokens behind the end of choice {index}")
            choice.token_ids.append(token)
            stops.check(choice)
        if choice.finish_reason is not None:
            raise _invalid(f"has choice {index}, which has ended")
        choices.append(choice)
    return choices


def _invalid(message: str) -> RequestRejected:
    return RequestRejected(FailureCode.INVALID_REQUEST, f"resume {message}", "resume")

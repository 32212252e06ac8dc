"""LogprobAllowance: limits the log-probabilities of an answer that is sent whole."""

from loraplex.engine.protocol import TokenEvent
from loraplex.platform.errors import InvalidRequest

MAX_LOGPROBS = 2**20  # some hundreds of MB


class LogprobAllowance:
    """The log-probabilities that one call may still have; its prompts' count, too."""

    def __init__(self, max_logprobs: int = MAX_LOGPROBS) -> None:
        self._max = max_logprobs
        self._left = max_logprobs

    def take(self, event: TokenEvent) -> None:
        """Counts an event's log-probabilities.

        Raises:
            InvalidRequest: if the call has too many now.
        """
        for positions in (event.logprobs, event.prompt_logprobs):
            if positions:
                self._left -= sum(1 + len(it.top) for it in positions if it is not None)
        if self._left < 0:
            raise InvalidRequest(
                f"The answer has more than {self._max} log-probabilities, which is too many to "
                "send at once. Ask for fewer choices, tokens or alternatives, or set stream.",
                "logprobs",
            )

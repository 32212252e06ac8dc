"""Call: the requests of one API call, and the progress of each."""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import msgspec

from loraplex.engine.protocol import GenerateRequest, Resume, TokenEvent


class Call:
    """The state from which a call can continue in another engine.

    Args:
        requests: one per prompt, with distinct ids and seeds set.
    """

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.num_moves = 0  # engines that ended while running the call
        self.engine = 0  # number of the engine that runs the call
        self._progress = {request.request_id: _Progress(request) for request in requests}

    @property
    def has_tokens(self) -> bool:
        return any(progress.has_tokens for progress in self._progress.values())

    def open_requests(self) -> list[GenerateRequest]:
        """Returns the unfinished requests, with the tokens known so far."""
        return [p.remaining() for p in self._progress.values() if p.is_open]

    def open_choices(self) -> list[tuple[str, int]]:
        """Returns (request id, index) of each unfinished choice."""
        return [
            (request_id, index)
            for request_id, progress in self._progress.items()
            for index in progress.open_choices()
        ]

    def note(self, event: TokenEvent) -> None:
        """Records an event of the call."""
        self._progress[event.request_id].note(event)

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest of the call, equal for calls that differ only in ids, seeds and priorities."""
        digest = hashlib.blake2b(digest_size=16)
        for progress in self._progress.values():
            digest.update(msgspec.msgpack.encode(_anonymous(progress.request)))
        return digest.digest()


class _Progress:
    """The tokens received for one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._choices: list[list[int] | None] = [[] for _ in range(request.sampling.n)]
        self._cached_tokens = 0

    @property
    def is_open(self) -> bool:
        return any(tokens is not None for tokens in self._choices)

    @property
    def has_tokens(self) -> bool:
        return any(tokens is None or tokens for tokens in self._choices)

    def open_choices(self) -> list[int]:
        return [index for index, tokens in enumerate(self._choices) if tokens is not None]

    def remaining(self) -> GenerateRequest:
        if not self.has_tokens:
            return self.request
        resume = Resume(choices=[*self._choices], cached_tokens=self._cached_tokens)
        return msgspec.structs.replace(self.request, resume=resume)

    def note(self, event: TokenEvent) -> None:
        if event.cached_tokens is not None:
            self._cached_tokens = event.cached_tokens
        if event.finish_reason is not None:
            self._choices[event.index] = None
        elif (tokens := self._choices[event.index]) is not None:
            tokens += event.token_ids


def _anonymous(request: GenerateRequest) -> GenerateRequest:
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    return msgspec.structs.replace(request, request_id="", sampling=sampling, priority=0)

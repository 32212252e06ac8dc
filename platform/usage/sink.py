"""UsageSink: records what each call has used, once per call."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

KEPT = 1000  # latest events in memory


class Outcome(StrEnum):
    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    FAILED = "failed"


@dataclass(frozen=True)
class UsageEvent:
    """The usage of one call, however it ended."""

    call_id: str
    tenant: str
    key_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    completion_tokens: int  # generated tokens, also if the client did not wait for the rest
    outcome: Outcome
    started_at: float  # Unix seconds
    finished_at: float


class UsageSink(Protocol):
    def record(self, event: UsageEvent) -> None:
        """Records an event; called once per call."""


class InMemoryUsage:
    """The latest events of this process."""

    def __init__(self, kept: int = KEPT) -> None:
        self.events: deque[UsageEvent] = deque(maxlen=kept)

    def record(self, event: UsageEvent) -> None:
        """As `UsageSink.record`."""
        self.events.append(event)

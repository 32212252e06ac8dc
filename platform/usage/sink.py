"""UsageSink: where it is written what each call has used, once per call."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

KEPT = 1000  # of the latest events, in memory


class Outcome(StrEnum):
    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    FAILED = "failed"


@dataclass(frozen=True)
class UsageEvent:
    """What one call has used, however it ended."""

    call_id: str
    tenant: str
    key_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int  # of these, found in the prefix cache
    completion_tokens: int  # that came, also where the client did not wait for the rest
    outcome: Outcome
    started_at: float  # Unix seconds
    finished_at: float


class UsageSink(Protocol):
    def record(self, event: UsageEvent) -> None:
        """Takes an event; it comes once per call."""


class InMemoryUsage:
    """Keeps the latest events of this process."""

    def __init__(self, kept: int = KEPT) -> None:
        self.events: deque[UsageEvent] = deque(maxlen=kept)

    def record(self, event: UsageEvent) -> None:
        """As `UsageSink.record`."""
        self.events.append(event)

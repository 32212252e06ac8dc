"""QuotaService: what a caller may still use, reserved before each call and settled after it."""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from loraplex.platform.auth.principal import Principal
from loraplex.platform.errors import TooManyRequests

RETRY_AFTER = 1  # seconds; a choice that ends makes room, at a time that cannot be known


@dataclass(frozen=True)
class Demand:
    """The most that a call can use."""

    choices: int
    prompt_tokens: int
    completion_tokens: int | None  # of all choices; None: as many as fit into the context


@dataclass(frozen=True)
class Reservation:
    """What one call has reserved until it is settled."""

    tenant: str
    demand: Demand


class QuotaService(Protocol):
    def reserve(self, principal: Principal, demand: Demand) -> Reservation:
        """Reserves what a call may use, all of it or nothing.

        Raises:
            TooManyRequests: with the time to wait, if too little is left.
        """

    def settle(self, reservation: Reservation) -> None:
        """Releases a reservation, once, when its call has ended."""


class InMemoryQuotas:
    """Limits how many choices of a tenant are open at once, in this process.

    Args:
        max_choices: None: any number.
    """

    def __init__(self, max_choices: int | None = None) -> None:
        self._max_choices = max_choices
        self._open: Counter[str] = Counter()

    def reserve(self, principal: Principal, demand: Demand) -> Reservation:
        """As `QuotaService.reserve`."""
        tenant, limit = principal.tenant, self._max_choices
        if limit is not None and self._open[tenant] + demand.choices > limit:
            raise TooManyRequests(
                f"This call asks for {demand.choices} choices while this tenant has "
                f"{self._open[tenant]} open; a tenant may have at most {limit} at once.",
                RETRY_AFTER,
            )
        self._open[tenant] += demand.choices
        return Reservation(tenant, demand)

    def settle(self, reservation: Reservation) -> None:
        """As `QuotaService.settle`."""
        self._open[reservation.tenant] -= reservation.demand.choices
        if not self._open[reservation.tenant]:
            del self._open[reservation.tenant]

    def num_open(self, tenant: str) -> int:
        """Returns how many choices of a tenant are reserved now."""
        return self._open[tenant]

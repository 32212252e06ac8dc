"""Budgets: the KV blocks that each account has, may have, and is guaranteed. Torch-free."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraplex.engine.protocol import TenantShare

OPERATOR = "<operator>"  # pays for base prompts; no tenant has this id


@dataclass
class Account:
    """The blocks that one account pays for. Only `Budgets` changes it."""

    name: str
    floor: int = 0
    ceiling: int | None = None
    held: int = 0  # in use
    cached: int = 0  # free, but with a prefix in them

    @property
    def charged(self) -> int:
        return self.held + self.cached

    @property
    def claim(self) -> int:
        """Returns the number of blocks that no other account may hold."""
        return max(self.held, self.floor)

    @property
    def is_at_ceiling(self) -> bool:
        return self.ceiling is not None and self.charged >= self.ceiling

    @property
    def is_over_ceiling(self) -> bool:
        return self.ceiling is not None and self.charged > self.ceiling

    @property
    def is_over_floor(self) -> bool:
        return self.charged > self.floor


class Budgets:
    """Floors, ceilings and the blocks held against them; every operation is O(1).

    Floors are guaranteed by one inequality: the sum over all accounts of max(held, floor) is at
    most the capacity. Held blocks never enter the unused part of another account's floor; cached
    ones may, since they are evicted at once when their place is needed. Only `set_shares` can break
    the inequality, by raising a floor above what other accounts have left: then the pool is
    overdrawn, and blocks are taken back from accounts that hold more than their floors.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: all blocks except the null block."""
        self.capacity = capacity
        self._accounts: dict[str, Account] = {}
        self._claims = 0
        self._floors = 0

    @property
    def accounts(self) -> Iterable[Account]:
        return self._accounts.values()

    @property
    def is_overdrawn(self) -> bool:
        return self._claims > self.capacity

    def of(self, name: str) -> Account:
        """Returns the account; a new one has no floor and no ceiling."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name)
        return account

    def num_available(self, name: str) -> int:
        """Returns how many more blocks the account could hold once cached ones are evicted."""
        account = self.of(name)
        room = self.capacity - self._claims + account.claim - account.held
        if account.ceiling is not None:
            room = min(room, account.ceiling - account.held)
        return max(0, room)

    def keeps_ceiling(self, name: str, count: int) -> bool:
        """Returns whether the account's ceiling allows `count` more blocks."""
        account = self.of(name)
        return account.ceiling is None or account.held + count <= account.ceiling

    def keeps_floors(self, demand: Mapping[str, int]) -> bool:
        """Returns whether all these accounts can hold that many more blocks at the same time,
        ceilings apart."""
        growth = 0
        for name, count in demand.items():
            account = self.of(name)
            growth += max(account.held + count, account.floor) - account.claim
        return self._claims + growth <= self.capacity

    def limit(self, name: str) -> int:
        """Returns the most blocks that the account can ever hold: all but the floors of others."""
        account = self.of(name)
        reserved = self._floors - account.floor
        if name != OPERATOR:  # base prompts stay until they are retired
            operator = self.of(OPERATOR)
            reserved += operator.claim - operator.floor
        room = self.capacity - reserved
        return max(0, room if account.ceiling is None else min(room, account.ceiling))

    def over_floor(self, name: str) -> int:
        """Returns the held blocks above the floor; negative below it."""
        account = self.of(name)
        return account.held - account.floor

    def charge(self, account: Account, held: int, cached: int) -> None:
        """Adds so many blocks of each kind to the account, or removes them where negative."""
        before = account.claim
        account.held += held
        account.cached += cached
        self._claims += account.claim - before

    def set_shares(self, shares: Iterable[TenantShare]) -> list[str]:
        """Sets the floors and ceilings of these tenants; other tenants keep theirs.

        Returns:
            every fault; where there is one, nothing has been changed.
        """
        shares = list(shares)
        faults = [fault for share in shares for fault in _faults(share)]
        names = [share.tenant for share in shares]
        faults += [
            f"{name!r} is named twice" for name in sorted(set(names)) if names.count(name) > 1
        ]
        floors = {name: account.floor for name, account in self._accounts.items()}
        floors |= {share.tenant: share.floor for share in shares}
        floors[OPERATOR] = max(floors.get(OPERATOR, 0), self.of(OPERATOR).held)
        if (total := sum(floors.values())) > self.capacity:
            faults.append(
                f"the floors add up to {total} blocks, base prompts included; there are "
                f"{self.capacity}"
            )
        if not faults:
            for share in shares:
                self._set(self.of(share.tenant), share)
        return faults

    def guarantee_operator(self, num_blocks: int) -> None:
        """Reserves so many blocks, including those that it holds, for the operator alone."""
        self._set(self.of(OPERATOR), TenantShare(OPERATOR, floor=num_blocks))

    def check_integrity(self, held: Mapping[str, int], cached: Mapping[str, int]) -> None:
        """Compares the running sums with a recount.

        Raises:
            RuntimeError: naming the first account that is wrong.
        """
        for name in {*self._accounts, *held, *cached}:
            account = self.of(name)
            if (account.held, account.cached) != (held.get(name, 0), cached.get(name, 0)):
                raise RuntimeError(f"account {name!r} is charged for blocks that it does not have")
        if self._claims != sum(account.claim for account in self._accounts.values()):
            raise RuntimeError("the sum of what accounts may keep is wrong")
        if self._floors != sum(account.floor for account in self._accounts.values()):
            raise RuntimeError("the sum of the floors is wrong")

    def _set(self, account: Account, share: TenantShare) -> None:
        before = account.claim
        self._floors += share.floor - account.floor
        account.floor, account.ceiling = share.floor, share.ceiling
        self._claims += account.claim - before


def _faults(share: TenantShare) -> list[str]:
    faults = []
    if share.tenant == OPERATOR:
        faults.append(f"{OPERATOR!r} is no tenant")
    if share.floor < 0:
        faults.append(f"the floor of {share.tenant!r} must be at least 0, got {share.floor}")
    if share.ceiling is not None and share.ceiling < share.floor:
        faults.append(
            f"the ceiling of {share.tenant!r} must be at least its floor of {share.floor}, "
            f"got {share.ceiling}"
        )
    if not 0 < share.weight < float("inf"):
        faults.append(
            f"the weight of {share.tenant!r} must be above 0 and finite, got {share.weight}"
        )
    return faults

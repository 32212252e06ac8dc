"""Reconciler: brings each new engine to the state that its predecessor had."""

import logging

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import TenantShare
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog

logger = logging.getLogger(__name__)


class Reconciler:
    """Holds what every engine of a deployment should have: base prompts, adapters and shares.

    All of it is lost with an engine. It is restored in this order, since an adapter may name a base
    prompt, and a floor must not take the memory that a base prompt had.
    """

    def __init__(self, catalog: Catalog, base_prompts: BasePrompts) -> None:
        self._catalog = catalog
        self._base_prompts = base_prompts
        self._shares: dict[str, TenantShare] = {}

    @property
    def shares(self) -> list[TenantShare]:
        """The tenants' shares, ordered by tenant; other tenants have the default share."""
        return [self._shares[tenant] for tenant in sorted(self._shares)]

    async def set_shares(self, engine: EngineClient, shares: list[TenantShare]) -> None:
        """Sets tenants' shares of this engine and of its successors, all or none.

        Raises:
            RequestRejected: with every fault.
            EngineUnavailable: if no engine can say whether the shares fit.
        """
        changed = [share for share in shares if self._shares.get(share.tenant) != share]
        if changed:
            await engine.set_tenant_shares(changed)
            self._shares |= {share.tenant: share for share in changed}

    async def restore(self, engine: EngineClient) -> list[str]:
        """Brings a new engine to the state of its predecessor.

        Adapters and shares that the engine refuses are left out. Refused shares are logged; refused
        adapters are logged, and their callers are told.

        Returns:
            why the engine cannot serve what its predecessor did: the faults of base prompts.

        Raises:
            EngineUnavailable: if that engine ends too.
        """
        faults = [*await self._base_prompts.restore(engine)]
        if not faults:
            await self._catalog.restore(engine)
            await self._restore_shares(engine)
        return faults

    async def _restore_shares(self, engine: EngineClient) -> None:
        if not self._shares:
            return
        try:
            await engine.set_tenant_shares(self.shares)
        except RequestRejected as rejection:
            logger.error("The new engine refuses the tenants' shares: %s", rejection.message)
            for share in self.shares:
                await self._restore_share(engine, share)

    async def _restore_share(self, engine: EngineClient, share: TenantShare) -> None:
        try:
            await engine.set_tenant_shares([share])
        except RequestRejected as rejection:
            del self._shares[share.tenant]
            logger.error("The tenant %s has lost its share: %s", share.tenant, rejection.message)

"""Reconciler: brings each new engine to the state that its predecessor had."""

import logging

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import TenantShare
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog

logger = logging.getLogger(__name__)


class Reconciler:
    """Holds what every engine of a deployment should have: base prompts, adapters, shares.

    An engine forgets all of it at its end. It is brought back in this order, since an adapter may
    name a base prompt, and a floor must not take the memory that a base prompt had.
    """

    def __init__(self, catalog: Catalog, base_prompts: BasePrompts) -> None:
        self._catalog = catalog
        self._base_prompts = base_prompts
        self._shares: dict[str, TenantShare] = {}

    @property
    def shares(self) -> list[TenantShare]:
        """What tenants were given, by their ids; the others have the default."""
        return [self._shares[tenant] for tenant in sorted(self._shares)]

    async def set_shares(self, engine: EngineClient, shares: list[TenantShare]) -> None:
        """Gives tenants their shares of this engine and of all that follow. All or nothing.

        Raises:
            RequestRejected: with every fault.
            EngineUnavailable: there is no engine to say whether the shares fit.
        """
        changed = [share for share in shares if self._shares.get(share.tenant) != share]
        if changed:
            await engine.set_tenant_shares(changed)
            self._shares |= {share.tenant: share for share in changed}

    async def restore(self, engine: EngineClient) -> list[str]:
        """Gives a new engine all that the last one had.

        Adapters and shares that it refuses are left out, which is logged or said to whoever asks
        for them.

        Returns:
            why it cannot serve what the last one did: what is wrong with base prompts.

        Raises:
            EngineUnavailable: that engine ended too.
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
            logger.error("A tenant is without its share now: %s", rejection.message)

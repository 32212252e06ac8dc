"""What an engine was told, the next one is told too."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.engine import fake_engine

from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import TenantShare
from loraplex.engine.supervisor import EngineSupervisor, RestartPolicy
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog
from loraplex.platform.catalog.store import InMemoryCatalog
from loraplex.platform.engines.reconciler import Reconciler

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-P", fake_engine.__file__)
ADA, BOB = TenantShare("ada", floor=2, weight=3.0), TenantShare("bob", floor=3)
GREEDY = TenantShare("bob", floor=9)  # more than the engine has


class Engines:
    """One engine after another, and what they should have."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self.reconciler = Reconciler(catalog, BasePrompts())
        self.client = EngineClient(f"ipc://{folder}/engine.sock", self._prepare)
        config = EngineConfig(model="fake", adapter_store=str(folder))
        policy = RestartPolicy(delay=0.01)
        self.supervisor = EngineSupervisor(config, self.client, policy, command=COMMAND)

    async def replace(self) -> None:
        """The engine ends, and the next one is ready."""
        assert self.supervisor.pid is not None
        os.kill(self.supervisor.pid, signal.SIGKILL)
        while self.client.is_alive:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(self.client.wait_ready(), 30)

    async def floors(self) -> dict[str, int]:
        """As the engine of now has them."""
        blocks = await self.client.block_map()
        return {blocks.owners[run.owner]: run.count for run in blocks.runs}

    async def _prepare(self, client: EngineClient) -> bool:
        assert await self.reconciler.restore(client) == []
        return True


@contextlib.asynccontextmanager
async def some_engines(folder: Path, catalog: Catalog) -> AsyncIterator[Engines]:
    engines = Engines(folder, catalog)
    await engines.client.start()
    running = asyncio.create_task(engines.supervisor.run())
    try:
        await asyncio.wait_for(engines.client.wait_ready(), 30)
        yield engines
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engines.client.close()


async def test_shares_outlive_the_engine(tmp_path: Path, catalog: Catalog) -> None:
    async with some_engines(tmp_path, catalog) as engines:
        await engines.reconciler.set_shares(engines.client, [ADA])
        await engines.reconciler.set_shares(engines.client, [BOB])
        await engines.replace()
        await engines.replace()

        assert await engines.floors() == {"ada": 2, "bob": 3}


async def test_refused_shares_are_none_for_the_next_engine_either(
    tmp_path: Path, catalog: Catalog
) -> None:
    async with some_engines(tmp_path, catalog) as engines:
        await engines.reconciler.set_shares(engines.client, [ADA])
        with pytest.raises(RequestRejected, match="asks too much"):
            await engines.reconciler.set_shares(engines.client, [BOB, GREEDY])
        await engines.replace()

        assert engines.reconciler.shares == [ADA]
        assert await engines.floors() == {"ada": 2}


async def test_shares_that_do_not_fit_the_next_engine_are_left_out_and_logged(
    tmp_path: Path, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    async with some_engines(tmp_path, catalog) as engines:
        await engines.reconciler.set_shares(engines.client, [ADA])
        engines.reconciler._shares["bob"] = GREEDY  # as if the last engine had been larger
        await engines.replace()

        assert engines.reconciler.shares == [ADA]
        assert await engines.floors() == {"ada": 2}
    assert "bob asks too much" in caplog.text


@pytest.fixture
def catalog() -> Catalog:
    return Catalog("base", InMemoryCatalog())

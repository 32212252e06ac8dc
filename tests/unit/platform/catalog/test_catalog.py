"""Names of adapters: a tenant's own, taken once, gone at once, the same after a restart."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.engine import fake_engine

from loraplex.adapters.manifest import Activation, Folder, Stored
from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.protocol import (
    AdapterInfo,
    BasePromptRef,
    RegisterAdapter,
)
from loraplex.engine.supervisor import EngineSupervisor
from loraplex.platform.auth.principal import Principal, TenantId
from loraplex.platform.catalog.base_prompts import BasePrompt, PromptSource
from loraplex.platform.catalog.service import Catalog
from loraplex.platform.catalog.store import AdapterSource, InMemoryCatalog
from loraplex.platform.errors import Conflict, ModelNotFound, Unavailable

pytestmark = pytest.mark.anyio

ADA, BOB = (
    Principal(TenantId(name), f"{name}-namespace", "key", frozenset()) for name in ("ada", "bob")
)
COMMAND = (sys.executable, "-P", fake_engine.__file__)


@pytest.fixture
def catalog() -> Catalog:
    return Catalog("base", InMemoryCatalog())


@contextlib.asynccontextmanager
async def engine(folder: Path, model: str = "fake") -> AsyncIterator[EngineClient]:
    client = EngineClient(f"ipc://{folder}/engine.sock")
    config = EngineConfig(model=model, adapter_store=str(folder))
    await client.start()
    running = asyncio.create_task(EngineSupervisor(config, client, command=COMMAND).run())
    try:
        await asyncio.wait_for(client.wait_ready(), 30)
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def names(catalog: Catalog, principal: Principal) -> list[str]:
    return [model.name for model in await catalog.list(principal)]


async def test_a_name_belongs_to_its_tenant(tmp_path: Path, catalog: Catalog) -> None:
    async with engine(tmp_path) as client:
        await catalog.register(client, ADA.tenant, AdapterSource("bot", tmp_path))

        assert await names(catalog, ADA) == ["base", "bot"]
        assert await names(catalog, BOB) == ["base"]
        assert (await catalog.resolve(ADA, "bot")).adapter is not None
        with pytest.raises(ModelNotFound) as foreign:
            await catalog.resolve(BOB, "bot")
        with pytest.raises(ModelNotFound) as unknown:
            await catalog.resolve(BOB, "robot")

    assert foreign.value.message == unknown.value.message.replace("robot", "bot")


async def test_a_name_is_taken_once(tmp_path: Path, catalog: Catalog) -> None:
    async with engine(tmp_path) as client:
        outcomes = await asyncio.gather(
            *(
                catalog.register(client, ADA.tenant, AdapterSource("bot", tmp_path))
                for _ in range(20)
            ),
            return_exceptions=True,
        )
        await catalog.register(client, BOB.tenant, AdapterSource("bot", tmp_path))
        with pytest.raises(Conflict):
            await catalog.register(client, BOB.tenant, AdapterSource("base", tmp_path))

    assert [type(outcome) for outcome in outcomes].count(Conflict) == 19


async def test_a_name_is_gone_at_once_and_can_be_given_anew(
    tmp_path: Path, catalog: Catalog
) -> None:
    async with engine(tmp_path) as client:
        first = await catalog.register(client, ADA.tenant, AdapterSource("bot", tmp_path))
        leaving = asyncio.create_task(catalog.unregister(client, ADA, "bot"))
        await asyncio.sleep(0)
        assert await names(catalog, ADA) == ["base"]
        await leaving
        with pytest.raises(ModelNotFound):
            await catalog.unregister(client, ADA, "bot")

        second = await catalog.register(client, ADA.tenant, AdapterSource("bot", tmp_path))

    assert first.adapter is not None
    assert second.adapter is not None
    assert first.adapter.adapter_id != second.adapter.adapter_id


async def test_a_refused_adapter_leaves_its_name_free(tmp_path: Path, catalog: Catalog) -> None:
    closed = EngineClient(f"ipc://{tmp_path}/nobody.sock")
    with pytest.raises(EngineUnavailable):
        await catalog.register(closed, ADA.tenant, AdapterSource("bot", tmp_path))

    async with engine(tmp_path) as client:
        await catalog.register(client, ADA.tenant, AdapterSource("bot", tmp_path))

    assert await names(catalog, ADA) == ["base", "bot"]


async def test_a_new_engine_gets_the_same_adapters_from_the_store(
    tmp_path: Path, catalog: Catalog
) -> None:
    async with engine(tmp_path) as client:
        before = await catalog.register(client, ADA.tenant, AdapterSource("bot", tmp_path))
    async with engine(tmp_path) as client:
        await catalog.restore(client)

    assert await catalog.resolve(ADA, "bot") == before


async def test_a_new_engine_is_told_how_each_adapter_acts(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[RegisterAdapter] = []
    register = EngineClient.register_adapter

    async def listen(client: EngineClient, command: RegisterAdapter) -> AdapterInfo:
        told.append(command)
        return await register(client, command)

    monkeypatch.setattr(EngineClient, "register_adapter", listen)
    ref = BasePromptRef(prompt_id="bpr_1", version=1)
    prompt = BasePrompt("rules", 0, PromptSource("Be kind."), ref, [5])
    bot = AdapterSource("bot", tmp_path, False, Activation.AFTER_PROMPT, prompt)
    async with engine(tmp_path) as client:
        await catalog.register(client, ADA.tenant, bot)
    async with engine(tmp_path) as client:
        await catalog.restore(client)

    terms = [(command.activation, command.base_prompt) for command in told]
    assert terms == [(Activation.AFTER_PROMPT, ref)] * 2
    first, again = (command.source for command in told)
    assert first == Folder(str(tmp_path))
    assert isinstance(again, Stored)
    assert again.origin == str(tmp_path)


@pytest.mark.parametrize(
    ("mood", "reason"),
    [("forgetful", "The stored copy has changed."), ("picky", "not this one")],
)
async def test_an_adapter_that_comes_back_another_or_not_at_all_is_not_served(
    tmp_path: Path, catalog: Catalog, caplog: pytest.LogCaptureFixture, mood: str, reason: str
) -> None:
    async with engine(tmp_path) as client:
        await catalog.register(client, ADA.tenant, AdapterSource("bot", tmp_path))
    async with engine(tmp_path, mood) as client:
        await catalog.restore(client)

    (_, model) = await catalog.list(ADA)
    assert model.fault == reason
    with pytest.raises(Unavailable, match=f"The model 'bot' cannot be served now: {reason}"):
        await catalog.resolve(ADA, "bot")
    assert f"The adapter bot of tenant ada cannot be served: {reason}" in caplog.text


async def test_an_adapter_that_failed_is_served_when_a_later_engine_takes_it(
    tmp_path: Path, catalog: Catalog
) -> None:
    await catalog.add_failed(ADA.tenant, AdapterSource("bot", tmp_path), "too many modules")
    with pytest.raises(Unavailable, match="too many modules"):
        await catalog.resolve(ADA, "bot")
    with pytest.raises(Conflict):
        await catalog.add_failed(ADA.tenant, AdapterSource("bot", tmp_path), "again")

    async with engine(tmp_path) as client:
        await catalog.restore(client)

    assert (await catalog.resolve(ADA, "bot")).adapter is not None


async def test_a_name_of_an_adapter_that_failed_can_be_given_up(
    tmp_path: Path, catalog: Catalog
) -> None:
    await catalog.add_failed(ADA.tenant, AdapterSource("bot", tmp_path), "too many modules")
    async with engine(tmp_path) as client:
        await catalog.unregister(client, ADA, "bot")

    assert await names(catalog, ADA) == ["base"]


async def test_a_name_that_is_removed_while_an_engine_takes_its_adapter_stays_removed(
    tmp_path: Path, catalog: Catalog
) -> None:
    await catalog.add_failed(ADA.tenant, AdapterSource("bot", tmp_path), "too many modules")
    async with engine(tmp_path) as client:
        restoring = asyncio.create_task(catalog.restore(client))
        await asyncio.sleep(0)
        await catalog.unregister(client, ADA, "bot")
        await restoring

    assert await names(catalog, ADA) == ["base"]

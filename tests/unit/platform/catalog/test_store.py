"""What every `CatalogStore` does: names are a tenant's own, taken once, and changed by one."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.platform.auth.principal import TenantId
from loraplex.platform.catalog.store import AdapterSource, CatalogStore, Entry, InMemoryCatalog
from loraplex.platform.errors import Conflict

pytestmark = pytest.mark.anyio

STORES = [InMemoryCatalog]  # every implementation passes all of these tests
ADA, BOB = TenantId("ada"), TenantId("bob")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> CatalogStore:
    empty: CatalogStore = request.param()
    return empty


def entry(tenant: TenantId, name: str) -> Entry:
    return Entry(tenant, AdapterSource(name, Path("/adapters") / name), created=1)


async def test_an_entry_is_found_by_its_tenant_and_name_only(store: CatalogStore) -> None:
    await store.add(entry(ADA, "bot"))

    assert await store.get(ADA, "bot") == entry(ADA, "bot")
    assert await store.get(BOB, "bot") is None
    assert await store.get(ADA, "cat") is None


async def test_entries_are_listed_by_name_within_a_tenant_and_by_age_over_all(
    store: CatalogStore,
) -> None:
    added = [entry(ADA, "cat"), entry(BOB, "bot"), entry(ADA, "ant")]
    for one in added:
        await store.add(one)

    assert await store.of_tenant(ADA) == [entry(ADA, "ant"), entry(ADA, "cat")]
    assert await store.all() == added


async def test_a_name_is_added_once_in_each_tenant(store: CatalogStore) -> None:
    outcomes = await asyncio.gather(
        *(store.add(entry(tenant, "bot")) for tenant in (ADA, ADA, BOB, ADA)),
        return_exceptions=True,
    )

    assert [type(outcome) for outcome in outcomes].count(Conflict) == 2
    assert len(await store.all()) == 2


async def test_a_failed_adapter_holds_its_name(store: CatalogStore) -> None:
    failed = replace(entry(ADA, "bot"), fault="too many modules")
    await store.add(failed)

    with pytest.raises(Conflict, match="There is a model 'bot' already"):
        await store.add(entry(ADA, "bot"))
    assert await store.get(ADA, "bot") == failed


async def test_an_entry_is_replaced_by_one_of_two_that_change_it(store: CatalogStore) -> None:
    known = entry(ADA, "bot")
    await store.add(known)

    outcomes = await asyncio.gather(
        *(store.replace(known, replace(known, fault=fault)) for fault in ("first", "second"))
    )

    assert sorted(outcomes) == [False, True]
    found = await store.get(ADA, "bot")
    assert found is not None
    assert found.fault == ("first" if outcomes[0] else "second")


async def test_a_replaced_entry_keeps_its_place(store: CatalogStore) -> None:
    for name in ("ant", "bot"):
        await store.add(entry(ADA, name))
    await store.replace(entry(ADA, "ant"), replace(entry(ADA, "ant"), fault="gone"))

    assert [one.name for one in await store.all()] == ["ant", "bot"]


async def test_a_removed_entry_does_not_come_back_by_a_late_change(store: CatalogStore) -> None:
    known = entry(ADA, "bot")
    await store.add(known)

    assert await store.remove(ADA, "bot") == known
    assert not await store.replace(known, replace(known, fault="late"))
    assert await store.remove(ADA, "bot") is None
    assert await store.all() == []

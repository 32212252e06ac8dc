"""No tenant keeps another waiting for more than one of its own."""

import asyncio

import pytest

from loraplex.platform.inference.bodies.budget import MemoryBudget
from loraplex.platform.inference.turns import Turns

pytestmark = pytest.mark.anyio


async def test_tenants_take_turns() -> None:
    turns, order = Turns(num_places=1, per_tenant=1), []

    async def work(tenant: str) -> None:
        async with turns.take(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(tenant) for tenant in "aaaabb"))

    assert "".join(order) == "ababaa"


async def test_a_tenant_never_has_all_places() -> None:
    turns, inside, most = Turns(num_places=2, per_tenant=1), 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with turns.take("a"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(5)))

    assert most == 1


async def test_who_gives_up_its_wait_holds_up_nobody() -> None:
    turns = Turns(num_places=1, per_tenant=1)

    async def wait() -> None:
        async with turns.take("a"):
            pass

    async with turns.take("a"):
        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        await asyncio.sleep(0)
    await asyncio.wait_for(waiting[2], 10)
    async with turns.take("b"), asyncio.timeout(10):
        pass


async def test_bodies_wait_for_room_but_not_for_a_tenant_at_its_limit() -> None:
    budget, entered = MemoryBudget(max_bytes=10, per_tenant=6), []

    async def hold(name: str, num_bytes: int, until: asyncio.Event) -> None:
        async with budget.hold(name[0], num_bytes):
            entered.append(name)
            await until.wait()

    done = asyncio.Event()
    tasks = [
        asyncio.create_task(hold(*held, done))
        for held in (("a1", 5), ("a2", 5), ("b1", 5), ("c1", 1))
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered == ["a1", "b1"]

    tasks[3].cancel()
    done.set()
    await asyncio.gather(*tasks[:3])
    assert entered == ["a1", "b1", "a2"]
    async with budget.hold("d", 6), budget.hold("e", 4), asyncio.timeout(10):
        pass


async def test_room_that_turns_out_too_large_is_given_back() -> None:
    budget = MemoryBudget(max_bytes=10, per_tenant=10)

    async with budget.hold("a", 10) as room:
        budget.shrink(room, 3)
        async with budget.hold("b", 7), asyncio.timeout(10):
            pass
    async with budget.hold("c", 10), asyncio.timeout(10):
        pass

"""However many ask, it is made once in a while."""

import asyncio

import pytest

from loraplex.platform.http.latest import Latest

pytestmark = pytest.mark.anyio


async def test_all_who_ask_within_a_while_get_the_same() -> None:
    made = 0

    async def render() -> bytes:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return b"%d" % made

    latest = Latest(render, max_age=1000)

    assert await asyncio.gather(*(latest.get() for _ in range(100))) == [b"1"] * 100


async def test_without_an_age_it_is_always_new() -> None:
    made = iter([b"1", b"2"])

    async def render() -> bytes:
        return next(made)

    latest = Latest(render, max_age=0)

    assert [await latest.get(), await latest.get()] == [b"1", b"2"]


async def test_who_gives_up_leaves_the_next_to_make_it() -> None:
    gate = asyncio.Event()

    async def render() -> bytes:
        await gate.wait()
        return b"made"

    latest = Latest(render, max_age=1000)
    first, second = asyncio.create_task(latest.get()), asyncio.create_task(latest.get())
    await asyncio.sleep(0)
    first.cancel()
    gate.set()

    assert await second == b"made"

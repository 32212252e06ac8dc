"""Small prompts do not wait for large ones, nor tenants for each other."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from support.models.word_tokenizer import word_tokenizer

from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.prompts.tokenizer_threads import (
    SMALL,
    TokenizerJob,
    TokenizerThreads,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def threads() -> Iterator[TokenizerThreads]:
    threads = TokenizerThreads()
    yield threads
    threads.close()


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(word_tokenizer(), {}, {})


def job(tenant: str, num_characters: int = SMALL + 1) -> TokenizerJob:
    return TokenizerJob(tenant, "prompt", num_characters, max_tokens=100)


async def test_a_tenant_with_many_large_prompts_keeps_nobody_waiting(
    threads: TokenizerThreads, tokenizer: Tokenizer
) -> None:
    gate = threading.Event()

    def wait(_: Tokenizer) -> bool:
        return gate.wait(30)

    held = [asyncio.create_task(threads.run(job("a"), tokenizer, wait)) for _ in range(8)]
    await asyncio.sleep(0)

    small = await asyncio.wait_for(threads.run(job("a", 1), tokenizer, lambda _: "small"), 30)
    large = await asyncio.wait_for(threads.run(job("b"), tokenizer, lambda _: "large"), 30)

    gate.set()
    assert (small, large) == ("small", "large")
    assert await asyncio.gather(*held) == [True] * 8


async def test_who_gives_up_ends_the_work(threads: TokenizerThreads, tokenizer: Tokenizer) -> None:
    started, ended = threading.Event(), threading.Event()

    def encode(bounded: Tokenizer) -> None:
        started.set()
        try:
            while True:
                bounded.encode("a")
        finally:
            ended.set()

    task = asyncio.create_task(threads.run(job("a"), tokenizer, encode))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()

    assert await asyncio.to_thread(ended.wait, 30)


async def test_a_prompt_that_cannot_fit_has_the_code_that_clients_look_for(
    threads: TokenizerThreads, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await threads.run(job("a"), tokenizer, lambda it: it.encode("x" * 10**6))

    assert caught.value.code == "context_length_exceeded"
    assert caught.value.message.startswith("This model's maximum context length is 100 tokens")

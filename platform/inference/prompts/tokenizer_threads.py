"""TokenizerThreads: renders and tokenises prompts beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from loraplex.engine.errors import PromptTooLong
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.errors import too_long
from loraplex.platform.inference.turns import Turns

SMALL = 2**16  # characters of a prompt that is tokenised in some hundredths of a second
SMALL_THREADS, LARGE_THREADS = 4, 2  # a tenant can hold all but one of each kind

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class TokenizerJob:
    """A prompt's tenant and size, and the length that fits."""

    tenant: str
    param: str  # the field that holds the prompt, for errors
    num_characters: int
    max_tokens: int


class _Lane:
    """Threads that tenants use in turns."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.turns = Turns(num_threads, num_threads - 1)
        self.threads = ThreadPoolExecutor(num_threads, name)


class TokenizerThreads:
    """Threads for small and for large prompts, so that small prompts do not wait for large ones."""

    def __init__(self) -> None:
        self._small = _Lane(SMALL_THREADS, "tokenizer")
        self._large = _Lane(LARGE_THREADS, "tokenizer-large")

    async def run(
        self,
        job: TokenizerJob,
        tokenizer: Tokenizer,
        work: Callable[Concatenate[Tokenizer, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Calls `work` in a thread, with a tokenizer that stops early on a prompt that cannot fit.

        If the caller is cancelled, the work ends soon, and its thread stays taken until then.

        Raises:
            InvalidRequest: if the prompt cannot fit.
        """
        lane = self._small if job.num_characters <= SMALL else self._large
        unwanted, started = threading.Event(), threading.Event()
        bounded = tokenizer.within(job.max_tokens, unwanted.is_set)

        def begin() -> Result:
            started.set()
            return work(bounded, *args, **kwargs)

        async def take_turn() -> Result:
            async with lane.turns.take(job.tenant):
                return await asyncio.get_running_loop().run_in_executor(lane.threads, begin)

        task = asyncio.create_task(take_turn())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            unwanted.set()
            if not started.is_set():
                task.cancel()
            raise
        except PromptTooLong as error:
            raise too_long(job.param, error.max_tokens, error.at_least) from error

    def close(self) -> None:
        for lane in (self._small, self._large):
            lane.threads.shutdown(wait=False, cancel_futures=True)

"""ParsingProcess: parses large bodies outside the API's process, one at a time.

Run as a program, this module is that process: it reads jobs from its input and writes the results.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import resource
import sys
from array import array
from typing import IO, Any, NamedTuple

from loraplex.platform.errors import InvalidRequest, too_long
from loraplex.platform.inference.bodies.parsing import Body, parse
from loraplex.platform.inference.bodies.schemas import CompletionRequest
from loraplex.platform.inference.turns import Turns

COMMAND = (sys.executable, "-P", "-m", "loraplex.platform.inference.bodies.process")
MAX_SECONDS = 60  # for one body
IDLE_SECONDS = 300  # after which the process ends and frees its memory
MEMORY = 4 * 2**30  # of the process
TOKENS_AT_ONCE = 2**15  # that become Python's numbers before other work has its turn


class Job(NamedTuple):
    kind: type[Any]
    content: bytes
    max_tokens: int  # of a prompt that fits


class ParsingProcess:
    """A process that starts with the first large body and ends after some idle time."""

    def __init__(self) -> None:
        self._turns = Turns(num_places=1, per_tenant=1)
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def parse(self, tenant: str, kind: type[Body], content: bytes, max_tokens: int) -> Body:
        """As `parsing.parse`, but also refuses prompts of more token ids than `max_tokens`. If the
        caller is cancelled, the work ends."""
        async with self._turns.take(tenant):
            if self._idle is not None:
                self._idle.cancel()
            try:
                answer = await asyncio.wait_for(
                    self._ask(Job(kind, content, max_tokens)), MAX_SECONDS
                )
            except TimeoutError:
                self.close()
                raise InvalidRequest("The body takes too long to be read.") from None
            except (OSError, EOFError):
                self.close()
                raise InvalidRequest("The body needs too much memory to be read.") from None
            except BaseException:
                self.close()
                raise
            self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close)
        body: Body = await _unpack(answer)
        return body

    def close(self) -> None:
        """Ends the process; the next body starts another."""
        if self._idle is not None:
            self._idle.cancel()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _ask(self, job: Job) -> Any:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe)
        source, sink = self._process.stdout, self._process.stdin
        if source is None or sink is None:
            raise EOFError
        sink.write(_framed(pickle.dumps(job)))
        await sink.drain()
        size = int.from_bytes(await source.readexactly(8), "big")
        return pickle.loads(await source.readexactly(size))


async def _unpack(answer: Any) -> Any:
    """Returns the body of an answer.

    Raises:
        InvalidRequest: if the answer is one.
    """
    if isinstance(answer, InvalidRequest):
        raise answer
    body, prompts = answer
    if prompts is not None:
        body.prompt = [await _numbers(prompt) for prompt in prompts]
    return body


async def _numbers(packed: "array[int]") -> list[int]:
    numbers: list[int] = []
    for start in range(0, len(packed), TOKENS_AT_ONCE):
        numbers += packed[start : start + TOKENS_AT_ONCE].tolist()
        await asyncio.sleep(0)
    return numbers


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "big") + content


def _answer(job: Job) -> Any:
    """Returns the body without its token ids and the packed token ids, or the error."""
    try:
        body = parse(job.kind, job.content)
        if not isinstance(body, CompletionRequest) or not isinstance(body.prompt[0], list):
            return body, None
        if (wanted := body.truncate_prompt_tokens) is not None:
            keep = wanted if wanted > 0 else job.max_tokens
            body.prompt = [ids[-keep:] for ids in body.prompt if isinstance(ids, list)]
        longest = max(map(len, body.prompt))
        if longest > job.max_tokens:
            return too_long("prompt", job.max_tokens, longest)
        prompts = [array("q", ids) for ids in body.prompt]
    except InvalidRequest as error:
        return error
    except OverflowError:
        return InvalidRequest("prompt: token ids must be 64-bit integers", "prompt")
    except MemoryError:
        return InvalidRequest("The body needs too much memory to be read.")
    body.prompt = []
    return body, prompts


def main(source: IO[bytes], sink: IO[bytes]) -> None:
    gc.disable()  # the objects of a job have no cycles, and are freed with it
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while head := source.read(8):
        job = Job(*pickle.loads(source.read(int.from_bytes(head, "big"))))
        sink.write(_framed(pickle.dumps(_answer(job))))
        sink.flush()
        del job


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)

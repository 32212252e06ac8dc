"""The threads on which the native kernels run."""

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE = 60.0  # seconds for another thread to get its turn

Chunk = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)


def parallel_for(
    library: ctypes.CDLL, chunks: int, threads: int, body: Callable[[int], None]
) -> None:
    call = Chunk(lambda _, chunk: body(chunk))
    library.lpx_parallel_for(chunks, threads, ctypes.cast(call, ctypes.c_void_p), None)


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("chunks", [0, 1, 2, 100])
def test_every_chunk_is_done_once(native: ctypes.CDLL, chunks: int, threads: int) -> None:
    done: Counter[int] = Counter()

    parallel_for(native, chunks, threads, lambda chunk: done.update([chunk]))

    assert done == Counter(range(chunks))


def test_another_thread_takes_part(native: ctypes.CDLL) -> None:
    threads: set[int] = set()

    def wait_for_company(chunk: int) -> None:
        threads.add(threading.get_native_id())
        wait_until(lambda: len(threads) == 2)

    parallel_for(native, 2, 2, wait_for_company)

    assert len(threads) == 2


def test_no_more_threads_take_part_than_are_asked_for(native: ctypes.CDLL) -> None:
    parallel_for(native, 8, 4, lambda chunk: time.sleep(0.001))
    threads: set[int] = set()

    def take_time(chunk: int) -> None:
        threads.add(threading.get_native_id())
        time.sleep(0.001)

    parallel_for(native, 20, 2, take_time)

    assert len(threads) <= 2


def test_the_caller_does_what_a_slow_worker_leaves(native: ctypes.CDLL) -> None:
    caller, done = threading.get_native_id(), Counter[int]()

    def be_slow_elsewhere(chunk: int) -> None:
        if threading.get_native_id() != caller:
            assert wait_until(lambda: done.total() == 9)
        done.update([chunk])

    parallel_for(native, 10, 2, be_slow_elsewhere)

    assert done == Counter(range(10))


def test_a_call_inside_a_chunk_stays_on_its_thread(native: ctypes.CDLL) -> None:
    threads: dict[int, set[int]] = {}

    def call_again(chunk: int) -> None:
        mine = threads.setdefault(threading.get_native_id(), set())
        parallel_for(native, 5, 2, lambda _: mine.add(threading.get_native_id()))

    parallel_for(native, 4, 2, call_again)

    assert threads == {thread: {thread} for thread in threads}


def test_several_threads_may_call_at_once(native: ctypes.CDLL) -> None:
    counts = [Counter[int]() for _ in range(4)]

    def call_often(count: Counter[int]) -> None:
        for _ in range(50):
            parallel_for(native, 7, 3, lambda chunk: count.update([chunk]))

    callers = [threading.Thread(target=call_often, args=[count]) for count in counts]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert counts == [Counter(dict.fromkeys(range(7), 50))] * 4


def test_workers_sleep_when_there_is_nothing_to_do(native: ctypes.CDLL) -> None:
    threads: set[int] = set()

    def wait_for_company(chunk: int) -> None:
        threads.add(threading.get_native_id())
        wait_until(lambda: len(threads) == 2)

    parallel_for(native, 2, 2, wait_for_company)
    (worker,) = threads - {threading.get_native_id()}

    def state() -> str:
        stat = Path(f"/proc/self/task/{worker}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    assert wait_until(lambda: state() == "S")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(native: ctypes.CDLL) -> None:
    parallel_for(native, 4, 2, lambda chunk: time.sleep(0.001))
    child = os.fork()
    if child == 0:
        done: Counter[int] = Counter()
        parallel_for(native, 10, 2, lambda chunk: done.update([chunk]))
        os._exit(0 if done == Counter(range(10)) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""How soon a prompt that was computed before is back: from the device, host memory, the disk.

Each time is to the first token of a request by itself: the blocks of all its tokens but the last
come from one tier, which is emptied of all else first, or all is computed. The files of the disk
tier are dropped from the system's cache before they are read. Also the rate at which a prompt's
blocks are copied out and in.

    python benchmarks/sharing/offload.py MODEL
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

from driver import open_engine, parser, random_prompt, request, save, show

from loraplex.engine.kv.offload.manager import OffloadManager
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.step import BlockMoves

REPEATS = 5
HOST_BYTES = 512 << 20
DISK_BYTES = 2 << 30
TENANT = "tenant"
FLUSH_EVERY = 1000  # blocks: fewer than the queue to the disk takes


def main() -> None:
    options = parser(__doc__).parse_args()
    lengths = [24, 48] if options.quick else [1000, 4000]
    memory = (4 << 20, 64 << 20) if options.quick else (HOST_BYTES, DISK_BYTES)
    with open_engine(
        options,
        kv_cache_memory=(16 << 20) if options.quick else (1 << 30),
        offload_memory=memory[0],
        offload_disk=memory[1],
        max_model_len=None if options.quick else 4096,
    ) as engine:
        while engine.prepare():
            pass
        figures = {str(length): measure(engine, length, options) for length in lengths}
        rates = copy_rates(engine, lengths[-1])
    show(
        ["tokens", "computed", "from the disk", "from host memory", "from the device"],
        [[length, *map(as_text, times.values())] for length, times in figures.items()],
    )
    show(["copied", "GB/s"], [[name, f"{rate:.2f}"] for name, rate in rates.items()])
    save(options, "offload", {"seconds_to_first_token": figures, "gigabytes_per_second": rates})


def measure(engine: LLMEngine, length: int, options: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first token from each tier: the median of a few."""
    repeats = 2 if options.quick else REPEATS
    prompt = random_prompt(engine, length + 1, seed=length)
    cold = [random_prompt(engine, length + 1, seed=length + 1 + i) for i in range(repeats)]
    computed = [first_token(engine, other) for other in cold]
    first_token(engine, prompt)
    times = {"computed": median(computed)}
    for name, prepare in (("disk", to_disk), ("host", to_host), ("device", nothing)):
        times[name] = median(again(engine, prompt, prepare) for _ in range(repeats))
    return times


def again(engine: LLMEngine, prompt: list[int], prepare: Callable[[LLMEngine], None]) -> float:
    """Seconds to the first token once `prepare` has moved the prompt's blocks."""
    prepare(engine)
    return first_token(engine, prompt)


def first_token(engine: LLMEngine, prompt: list[int]) -> float:
    """Seconds until a request by itself has its only token."""
    start = time.perf_counter()
    engine.add(request("r", prompt, 1, tenant=TENANT))
    while not engine.step():
        if not engine.has_work:
            time.sleep(0.0005)  # the disk is being read
    return time.perf_counter() - start


def nothing(engine: LLMEngine) -> None:
    """Leaves the blocks where they are."""


def to_host(engine: LLMEngine) -> None:
    """Evicts all that the device has cached."""
    pool = engine._scheduler.kv.pool
    pool.release([pool.allocate(TENANT) for _ in range(pool.num_available(TENANT))])
    engine.step()
    engine.step()


def to_disk(engine: LLMEngine) -> None:
    """Evicts all from the device and from host memory, and drops the files from memory."""
    to_host(engine)
    tiers = lower_tiers(engine)
    assert tiers.disk is not None
    others = []
    for index in range(tiers.host.num_slots):
        others.append(tiers.host.reserve((-1, index.to_bytes(4)), (), TENANT))
        if index % FLUSH_EVERY == 0:
            tiers.disk.flush()
    for other in others:
        if other is not None:
            tiers.host.discard(other)
    tiers.disk.flush()
    for path in tiers.disk.folder.glob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy_rates(engine: LLMEngine, length: int) -> dict[str, float]:
    """GB/s of copies between device and host, of as many blocks as a prompt has."""
    tiers, kv = lower_tiers(engine), engine._scheduler.kv
    count = min(len(kv.groups) * length // kv.block_size, tiers.host.num_slots, kv.pool.num_blocks)
    to_host(engine)
    pairs = tuple((1 + i, i) for i in range(count))
    num_bytes = count * tiers.arena.storage.bytes_per_block
    moves = {
        "out": BlockMoves(offloads=pairs),
        "in": BlockMoves(fetches=tuple((slot, block) for block, slot in pairs)),
    }
    rates = {}
    for name, move in moves.items():
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            tiers.transfers.move(move)
            tiers.transfers.finish()
            times.append(time.perf_counter() - start)
        rates[name] = num_bytes / min(times) / 1e9
    return rates


def lower_tiers(engine: LLMEngine) -> OffloadManager:
    tiers = engine._scheduler.kv.tiers
    assert isinstance(tiers, OffloadManager)
    return tiers


def as_text(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


if __name__ == "__main__":
    main()

"""Blocks in the lower tiers, without a model."""

from pathlib import Path

from loraplex.engine.kv.offload.disk_tier import DiskTier
from loraplex.engine.kv.offload.segment import OffloadIdentity, Record
from loraplex.engine.kv.tiers import BlockKey

BLOCK_SIZE = 4
IDENTITY = OffloadIdentity(
    kv_format="float32",
    model_revision="1",
    quantization="none",
    numerics="1",
    layout="one group",
    block_size=BLOCK_SIZE,
    block_bytes=64,
)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def key_of(number: int) -> BlockKey:
    return number % 2, number.to_bytes(32)


def tokens_of(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + BLOCK_SIZE))


def record_of(number: int) -> Record:
    """A block with content, all of which its number decides."""
    content = number.to_bytes(4) * (IDENTITY.block_bytes // 4)
    return Record(key_of(number), tokens_of(number), content)


def reopen(tier: DiskTier, parent: Path, limit_bytes: int) -> DiskTier:
    """What a restarted engine finds."""
    tier.close()
    return DiskTier(parent, limit_bytes, IDENTITY)


def read(tier: DiskTier, numbers: list[int]) -> list[Record | None]:
    """Reads blocks that the tier has, and waits for them."""
    keys = [key_of(number) for number in numbers]
    done = tier.read(keys)
    done.exception(timeout=10)
    return tier.judge(keys, done)

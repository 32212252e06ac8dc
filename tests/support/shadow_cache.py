"""ShadowCache: what every slot of every block really holds, beside a KVCacheManager."""

from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.sequence import Sequence

Mark = tuple[int, str, int]  # group, namespace, all that the token's KV depends on


class ShadowCache:
    """Marks slots as they are written, and finds out whether a sequence reads its own history."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._slots: dict[tuple[int, int], Mark] = {}  # (block id, offset)

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        """What a step does: first the copies, then the next tokens of the sequence."""
        size = self._kv.block_size
        for copy in self._kv.take_copies():
            for offset in range(size):
                if (copy.source, offset) in self._slots:
                    self._slots[copy.target, offset] = self._slots[copy.source, offset]
        marks, table = history(sequence), self._kv.block_ids(sequence)
        start = sequence.num_computed_tokens
        for group in range(len(self._kv.groups)):
            for position in range(start, start + num_tokens):
                slot = (int(table[group, position // size]), position % size)
                self._slots[slot] = (group, sequence.namespace, marks[position])

    def check(self, sequence: Sequence) -> None:
        """Reads all that the sequence's next token would see."""
        size, marks = self._kv.block_size, history(sequence)
        table, end = self._kv.block_ids(sequence), sequence.num_computed_tokens
        for index, group in enumerate(self._kv.groups):
            first = 0 if group.window is None else max(0, end - group.window + 1)
            for position in range(first, end):
                block = int(table[index, position // size])
                found = self._slots.get((block, position % size))
                assert found == (index, sequence.namespace, marks[position]), (
                    f"group {index}, position {position}, block {block}"
                )

    def block(self, block_id: int) -> list[Mark | None]:
        return [self._slots.get((block_id, offset)) for offset in range(self._kv.block_size)]


def history(sequence: Sequence) -> list[int]:
    """Per position: a number made of every token up to it, and of the adapter on each."""
    marks: list[int] = []
    for position, token in enumerate(sequence.token_ids):
        acts = sequence.adapter is not None and position >= sequence.adapter_start
        adapter = int.from_bytes(sequence.adapter.digest.encode()) if acts else 0
        marks.append(hash((marks[-1] if marks else 0, token, adapter)))
    return marks

"""ShadowCache: what every slot of every block really holds, beside a KVCacheManager."""

from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.sequence import Sequence

Mark = tuple[int, str, int]  # group, namespace, all that the token's KV depends on
PUBLIC = "public"  # stands for the namespace of tokens inside a base prompt


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
        table, written_from = self._kv.block_ids(sequence), self._kv.written_from(sequence)
        start = sequence.num_computed_tokens
        for group in range(len(self._kv.groups)):
            marks = self._marks(sequence, group)
            for position in range(max(start, written_from[group]), start + num_tokens):
                slot = (int(table[group, position // size]), position % size)
                self._slots[slot] = marks[position]

    def check(self, sequence: Sequence) -> None:
        """Reads all that the sequence's next token would see."""
        size = self._kv.block_size
        table, end = self._kv.block_ids(sequence), sequence.num_computed_tokens
        for index, group in enumerate(self._kv.groups):
            marks = self._marks(sequence, index)
            first = 0 if group.window is None else max(0, end - group.window + 1)
            for position in range(first, end):
                block = int(table[index, position // size])
                found = self._slots.get((block, position % size))
                expected = [marks[position]]
                if position // size == sequence.block_keys.num_public:  # the end of a base prompt
                    expected.append((index, PUBLIC, marks[position][2]))
                assert found in expected, f"group {index}, position {position}, block {block}"

    def block(self, block_id: int) -> list[Mark | None]:
        return [self._slots.get((block_id, offset)) for offset in range(self._kv.block_size)]

    def _marks(self, sequence: Sequence, group: int) -> list[Mark]:
        below = max(self._kv.groups[group].layers) < sequence.frontier
        num_public = sequence.block_keys.num_public * self._kv.block_size
        if not (sequence.adapter is None or below):
            num_public = min(num_public, sequence.adapter_start)
        if sequence.is_base_prompt:
            num_public = sequence.num_tokens
        return [
            (group, PUBLIC if position < num_public else sequence.namespace, mark)
            for position, mark in enumerate(history(sequence, adapted=not below))
        ]


def history(sequence: Sequence, *, adapted: bool = True) -> list[int]:
    """Per position: a number made of every token up to it, and of the adapter on each."""
    marks: list[int] = []
    for position, token in enumerate(sequence.token_ids):
        acts = adapted and sequence.adapter is not None and position >= sequence.adapter_start
        adapter = int.from_bytes(sequence.adapter.digest.encode()) if acts else 0
        marks.append(hash((marks[-1] if marks else 0, token, adapter)))
    return marks

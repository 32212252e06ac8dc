"""ShadowCache: what every slot of every block really holds, beside a KVCacheManager."""

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.sequence import Sequence

Mark = tuple[int, str, int]  # group, namespace, all that the token's KV depends on
PROMPT = "prompt"  # the namespace of the sequences that compute base prompts


class ShadowCache:
    """Marks slots as they are written, and finds out whether a sequence reads its own history."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._slots: dict[tuple[int, int], Mark] = {}  # (block id, offset)
        self._writers: set[str] = set()

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        """What a step does: first the copies, then the next tokens of the sequence."""
        size = self._kv.block_size
        self._writers.add(sequence.namespace)
        for copy in self._kv.take_copies():
            for offset in range(size):
                if (copy.source, offset) in self._slots:
                    self._slots[copy.target, offset] = self._slots[copy.source, offset]
        table, first_writable = self._kv.block_ids(sequence), self._kv.first_writable(sequence)
        start = sequence.num_computed_tokens
        for group in range(len(self._kv.groups)):
            marks = self._marks(sequence, group)
            for position in range(max(start, first_writable[group]), start + num_tokens):
                slot = (int(table[group, position // size]), position % size)
                self._slots[slot] = marks[position]

    def check(self, sequence: Sequence) -> None:
        """Reads all that the sequence's next token would see."""
        size = self._kv.block_size
        table, end = self._kv.block_ids(sequence), sequence.num_computed_tokens
        for index, group in enumerate(self._kv.groups):
            marks = self._marks(sequence, index)
            window = group.state.window
            first = 0 if window is None else max(0, end - window + 1)
            for position in range(first, end):
                block = int(table[index, position // size])
                found = self._slots[block, position % size]
                readable = self._readable(sequence, position, marks[position])
                assert found in readable, f"group {index}, position {position}, block {block}"

    def block(self, block_id: int) -> list[Mark | None]:
        return [self._slots.get((block_id, offset)) for offset in range(self._kv.block_size)]

    def _marks(self, sequence: Sequence, group: int) -> list[Mark]:
        below = max(self._kv.groups[group].layers) < sequence.frontier
        marks = history(sequence, adapted=not below)
        return [(group, sequence.namespace, mark) for mark in marks]

    def _readable(self, sequence: Sequence, position: int, own: Mark) -> list[Mark]:
        """Its own mark; up to the end of a base prompt also that of whoever computed it."""
        group, _, mark = own
        below = max(self._kv.groups[group].layers) < sequence.frontier
        behind = position // self._kv.block_size - sequence.block_keys.num_public
        if behind > 0 or not (
            sequence.adapter is None or below or position < sequence.adapter_start
        ):
            return [own]
        others = [PROMPT] if behind == 0 else [PROMPT, *self._writers]
        return [own, *((group, namespace, mark) for namespace in others)]


def history(sequence: Sequence, *, adapted: bool = True) -> list[int]:
    """Per position: a number made of every token up to it, and of the adapter on each."""
    marks: list[int] = []
    for position, token in enumerate(sequence.token_ids):
        acts = adapted and sequence.adapter is not None and position >= sequence.adapter_start
        adapter = int.from_bytes(sequence.adapter.digest.encode()) if acts else 0
        marks.append(hash((marks[-1] if marks else 0, token, adapter)))
    return marks

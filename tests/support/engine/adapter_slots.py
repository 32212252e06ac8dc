"""AdapterSlots without weights: real slots, and loads that take a number of looks."""

from collections.abc import Mapping

from loraplex.adapters.manifest import AdapterLoad, AdapterRef
from loraplex.adapters.residency.pool import AdapterPool


class NamedSlots:
    """Knows which content sits in which slot; a content is loaded after `delay` questions.

    Args:
        sizes: bytes of each content; 0 where it is not there.
        max_bytes: of all that are resident.
    """

    def __init__(
        self,
        num_slots: int = 2,
        delay: int = 0,
        sizes: Mapping[str, int] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.pool = AdapterPool(num_slots, max_bytes)
        self._sizes = sizes or {}
        self.content: dict[int, str | None] = {}  # slot -> digest
        self._loads: dict[int, str | None] = {}
        self._delay = delay
        self._asked: dict[str, int] = {}

    def is_ready(self, ref: AdapterRef) -> bool:
        return self._asked.get(ref.digest, 0) >= self._delay

    def prepare(self, ref: AdapterRef) -> bool:
        self._asked[ref.digest] = self._asked.get(ref.digest, 0) + 1
        return self._asked[ref.digest] > self._delay

    def bytes_to_load(self, ref: AdapterRef) -> int:
        return 0 if ref.digest in self.pool else self.size_of(ref)

    def size_of(self, ref: AdapterRef) -> int:
        return self._sizes.get(ref.adapter_id, 0)

    def acquire(self, ref: AdapterRef) -> int | None:
        is_resident = ref.digest in self.pool
        slot = self.pool.acquire(ref.digest, self.size_of(ref))
        if slot is not None and not is_resident:
            self._loads[slot] = ref.digest
        return slot

    def take_loads(self) -> list[AdapterLoad]:
        loads, self._loads = self._loads, {}
        return [AdapterLoad(slot, digest) for slot, digest in loads.items()]

    def place(self, load: AdapterLoad) -> None:
        self.content[load.slot] = load.digest

    def release(self, ref: AdapterRef) -> None:
        self.pool.release(ref.digest)

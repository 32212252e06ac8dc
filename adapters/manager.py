"""LoRAManager: registers, loads, places and removes adapters."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loraplex.adapters.errors import (
    AdapterError,
    AdapterInUse,
    AdapterNotFound,
    AdapterRejected,
    shown,
)
from loraplex.adapters.frontier import frontier
from loraplex.adapters.injection import LoRASites
from loraplex.adapters.manifest import (
    Activation,
    AdapterLoad,
    AdapterManifest,
    AdapterRef,
    AdapterStats,
)
from loraplex.adapters.reader import AdapterReader, ReadAdapter
from loraplex.adapters.registration import RegisteredAdapter, StoredCopy
from loraplex.adapters.residency.eviction import EvictionPolicy
from loraplex.adapters.residency.host_cache import HostCache
from loraplex.adapters.residency.loader import AdapterLoader
from loraplex.adapters.residency.pool import AdapterPool
from loraplex.adapters.trial import trial_faults
from loraplex.adapters.weights import LoRAWeights

DEFAULT_HOST_BYTES = 1 << 30
MAX_LOOKED_AT = 64  # stored adapters whose frontiers are asked for at start


@dataclass(frozen=True)
class _Entry:
    info: RegisteredAdapter
    manifest: AdapterManifest
    copy: StoredCopy


class LoRAManager:
    """The adapters of one engine, from files to slots.

    `register` blocks and may run on any thread; everything else belongs to the engine's thread and
    returns at once.

    Args:
        sites: the injected model's LoRA layers.
        store: the folder where copies are kept; other engines may use it too.
        base_names: names of the served base model; an adapter trained on another is refused.
        host_bytes: how much host memory loaded adapters may take.
        device_bytes: how much device memory resident ones may take; None: whatever they take.
        eviction: which idle one leaves its slot first; None: the least recently used.
        added_tokens: what the base model's own tokenizer adds to its vocabulary, with the ids.
    """

    def __init__(  # noqa: PLR0913 - each has a default but the first three
        self,
        sites: LoRASites,
        store: Path,
        base_names: Iterable[str],
        *,
        host_bytes: int = DEFAULT_HOST_BYTES,
        device_bytes: int | None = None,
        eviction: EvictionPolicy | None = None,
        added_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self._sites = sites
        self._reader = AdapterReader(sites, store, added_tokens or {})
        self._base_names = {_last_part(name) for name in base_names} - {""}
        self._pool = AdapterPool(sites.num_slots, device_bytes, eviction)
        self._cache = HostCache(host_bytes)
        self._loader = AdapterLoader(self._cache)
        self._entries: dict[AdapterRef, _Entry] = {}
        self._references: dict[AdapterRef, int] = {}
        self._loads: dict[int, str | None] = {}  # digests by slot, not yet taken by a step
        self._placing: dict[str, LoRAWeights] = {}  # by digest, until they are in their slots
        self._lock = threading.Lock()  # guards _entries, which register shares with the engine

    def register(
        self,
        tenant: str,
        adapter_id: str,
        source: Path | StoredCopy,
        allow_base_mismatch: bool = False,
        activation: Activation | None = None,
    ) -> RegisteredAdapter:
        """Reads, checks and stores an adapter. The same content again changes nothing.

        Args:
            tenant: the owner.
            adapter_id: a server-made id.
            source: a PEFT folder, which is needed again only to mend the copy that is kept of it;
                or such a copy.
            allow_base_mismatch: accept an adapter whose config names another base model.
            activation: from where on it acts; None: as it was trained.

        Raises:
            AdapterRejected: with every fault found. Also where the same content is registered under
                this id to act from elsewhere.
            AdapterUnavailable: the store cannot be used, or the copy is damaged.
        """

        def judge(read: ReadAdapter) -> None:
            self._judge_base(read.manifest, allow_base_mismatch)
            _judge_activation(read.manifest, activation)
            self._judge_size(read.weights.num_bytes)
            faults = trial_faults(read.weights, self._sites.catalogue.modules)
            if faults:
                raise AdapterRejected(faults)

        if isinstance(source, StoredCopy):
            copy, read = source, self._reader.read_copy(source, judge)
        else:
            read = self._reader.read_folder(source, judge)
            copy = StoredCopy(read.digest, source)
        ref = AdapterRef(tenant=tenant, adapter_id=adapter_id, digest=read.digest)
        info = self._describe(ref, read, activation or read.manifest.activation)
        with self._lock:
            entry = self._entries.setdefault(ref, _Entry(info, read.manifest, copy))
            self._cache.offer(ref.digest, read.weights)  # who registers it will use it soon
        if entry.info.activation is not info.activation:
            raise AdapterRejected(
                [
                    f"the adapter is registered with activation {entry.info.activation}; to have "
                    f"{info.activation} it must be unregistered first"
                ]
            )
        return entry.info

    def unregister(self, ref: AdapterRef) -> None:
        """Removes an adapter and frees its slot and host memory; the stored copy stays.

        Raises:
            AdapterNotFound: it is not registered.
            AdapterInUse: a sequence still holds it.
        """
        self._entry(ref)
        if self.num_references(ref):
            raise AdapterInUse("the adapter is in use")
        with self._lock:
            del self._entries[ref]
            shared = any(other.digest == ref.digest for other in self._entries)
        if shared:
            return
        self._loader.forget(ref.digest)
        slot = self._pool.discard(ref.digest)
        if slot is not None:
            self._sites.clear(slot)

    def info(self, ref: AdapterRef) -> RegisteredAdapter:
        """Returns what its registration found. Raises AdapterNotFound where it is not
        registered."""
        return self._entry(ref).info

    def manifest(self, ref: AdapterRef) -> AdapterManifest:
        """Returns its manifest. Raises AdapterNotFound where it is not registered."""
        return self._entry(ref).manifest

    def stored_frontiers(self) -> list[int]:
        """Returns the layer frontiers of the most recent stored adapters that were checked for this
        base model, registered now or not."""
        modules = self._sites.catalogue.modules
        return [
            frontier(modules[module.name] for module in plan.modules)
            for plan in self._reader.plans(MAX_LOOKED_AT)
        ]

    def is_ready(self, ref: AdapterRef) -> bool:
        """Returns whether `acquire` needs no loading. Starts no load.

        Raises:
            AdapterNotFound: it is not registered.
        """
        self._entry(ref)
        return ref.digest in self._pool or ref.digest in self._cache

    def prepare(self, ref: AdapterRef) -> bool:
        """Returns whether `acquire` needs no loading; if it does, makes sure that a load is under
        way.

        Raises:
            AdapterNotFound: it is not registered.
        """
        copy = self._entry(ref).copy
        return ref.digest in self._pool or self._loader.ready(ref.digest, partial(self._load, copy))

    def load_error(self, ref: AdapterRef) -> AdapterError | None:
        """Returns why the last load failed. A second later it is forgotten, and `prepare` tries
        again."""
        return self._loader.error(ref.digest)

    def bytes_to_load(self, ref: AdapterRef) -> int:
        """Returns the bytes that `acquire` would place on the device now; 0 where they are there
        already.

        Raises:
            AdapterNotFound: it is not registered.
        """
        num_bytes = self._entry(ref).info.num_bytes
        return 0 if ref.digest in self._pool else num_bytes

    def acquire(self, ref: AdapterRef) -> int | None:
        """Takes one reference on an adapter's slot, which does not move until all are released.

        Returns:
            The slot, whose content `take_loads` may still have to bring; None where too many slots
            or bytes are in use, or `prepare` has not become true.

        Raises:
            AdapterNotFound: it is not registered.
        """
        num_bytes = self._entry(ref).info.num_bytes
        resident = ref.digest in self._pool
        weights = None if resident else self._cache.get(ref.digest)
        if not resident and weights is None:
            return None
        slot = self._pool.acquire(ref.digest, num_bytes)
        if slot is None:
            return None
        for vacated in self._pool.take_vacated():
            self._loads.setdefault(vacated, None)
        if weights is not None:
            self._placing[ref.digest] = weights
            self._loads[slot] = ref.digest
        self._references[ref] = self._references.get(ref, 0) + 1
        return slot

    def take_loads(self) -> list[AdapterLoad]:
        """Returns what `acquire` has decided since the last call: each item must be given to
        `place`, in order, before the next forward pass. Evictions come first, so that there is
        room."""
        loads, self._loads = self._loads, {}
        self._placing = {digest: self._placing[digest] for digest in loads.values() if digest}
        by_slot = sorted(loads.items(), key=lambda load: load[1] is not None)
        return [AdapterLoad(slot, digest) for slot, digest in by_slot]

    def place(self, load: AdapterLoad) -> None:
        """Places an adapter in its slot, or empties the slot, in the order of the device's work."""
        if load.digest is None:
            self._sites.clear(load.slot)
        else:
            self._sites.set(load.slot, self._placing.pop(load.digest))

    def release(self, ref: AdapterRef) -> None:
        """Releases one reference.

        Raises:
            KeyError: the adapter has no reference.
        """
        self._references[ref] -= 1
        if self._references[ref] == 0:
            del self._references[ref]
        self._pool.release(ref.digest, self._loader.seconds(ref.digest))

    def num_references(self, ref: AdapterRef) -> int:
        return self._references.get(ref, 0)

    def stats(self) -> AdapterStats:
        return AdapterStats(
            registered=len(self._entries),
            resident=len(self._pool),
            slots=self._pool.num_slots,
            loads=self._loader.num_loads,
            evictions=self._pool.num_evictions,
            references=self._pool.num_references,
            host_bytes=self._cache.num_bytes,
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError where the books of slots and references do not balance."""
        self._pool.check_integrity()
        if sum(self._references.values()) != self._pool.num_references:
            raise RuntimeError("references of adapters and of their slots differ")

    def close(self) -> None:
        """Ends the loading thread and the process that checks adapters."""
        self._loader.close()
        self._reader.close()

    def _entry(self, ref: AdapterRef) -> _Entry:
        entry = self._entries.get(ref)
        if entry is None:
            raise AdapterNotFound("the adapter is not registered")
        return entry

    def _load(self, copy: StoredCopy) -> LoRAWeights:
        return self._reader.read_copy(copy, lambda read: None).weights

    def _describe(
        self, ref: AdapterRef, read: ReadAdapter, activation: Activation
    ) -> RegisteredAdapter:
        modules, weights = self._sites.catalogue.modules, read.weights
        return RegisteredAdapter(
            ref=ref,
            rank=max(module.b.shape[1] for module in weights.modules.values()),
            target_modules=sorted({name.rpartition(".")[2] for name in weights.modules}),
            num_modules=len(weights.modules),
            num_bytes=weights.num_bytes,
            activation=activation,
            frontier=frontier(modules[name] for name in weights.modules),
            base_model=read.manifest.base_model,
            base_mismatch=self._is_other_base(read.manifest),
        )

    def _judge_size(self, num_bytes: int) -> None:
        limit = self._pool.max_bytes
        if limit is not None and num_bytes > limit:
            raise AdapterRejected(
                [
                    f"the adapter takes {num_bytes:,} bytes, but this server has {limit:,} for all "
                    "adapters in use (--adapter-memory)"
                ]
            )

    def _judge_base(self, manifest: AdapterManifest, allow_mismatch: bool) -> None:
        if allow_mismatch or not self._is_other_base(manifest):
            return
        name, served = (
            _last_part(manifest.base_model),
            ", ".join(map(repr, sorted(self._base_names))),
        )
        raise AdapterRejected(
            [f"the adapter was trained on {shown(name)}, the served base model is {served}"]
        )

    def _is_other_base(self, manifest: AdapterManifest) -> bool:
        """Returns whether the adapter was trained on a base of another name."""
        name = _last_part(manifest.base_model)
        return bool(name and self._base_names) and name not in self._base_names


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()


def _judge_activation(manifest: AdapterManifest, wanted: Activation | None) -> None:
    if wanted is Activation.INVOCATION and not manifest.invocation_tokens:
        raise AdapterRejected(["activation invocation needs an adapter with invocation tokens"])

"""ToyAdapters: the door to adapters that have slots and terms, but no weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.engine.adapter_slots import NamedSlots
from support.engine.kv import adapter_ref

from loraplex.adapters.errors import AdapterNotFound, AdapterRejected
from loraplex.adapters.manifest import Activation, AdapterRef, AdapterStats
from loraplex.adapters.registration import RegisteredAdapter
from loraplex.engine.scheduling.scheduler import Scheduler

TENANTS = ("x", "y", "z")  # each has all adapters, of the same contents
INVOCATION = [1, 1]
# What the content is named by says from which layer on it acts, and from which token by default.
FRONTIERS = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 2}
ACTIVATIONS = {"b": Activation.AFTER_PROMPT, "c": Activation.INVOCATION}


class ToyAdapters:
    """As LoRAManager, of adapters that were all registered before the start."""

    def __init__(self, slots: NamedSlots, scheduler: Scheduler) -> None:
        self._slots = slots
        self._scheduler = scheduler
        refs = [adapter_ref(name, tenant) for name in FRONTIERS for tenant in TENANTS]
        self._registered = {ref: _usual(ref) for ref in refs}

    def register(self, tenant: str, adapter_id: str, path: Path, **terms: Any) -> RegisteredAdapter:
        ref = adapter_ref(adapter_id, tenant)
        activation = terms["activation"] or _usual(ref)
        known = self._registered.setdefault(ref, activation)
        if known is not activation:
            raise AdapterRejected([f"it is registered with {known}"])
        return RegisteredAdapter(
            ref=ref,
            rank=1,
            target_modules=["toy"],
            num_modules=1,
            num_bytes=0,
            activation=activation,
            frontier=FRONTIERS[adapter_id],
            base_model="toy",
            base_mismatch=False,
        )

    def unregister(self, ref: AdapterRef) -> None:
        self.info(ref)
        assert ref not in self._scheduler.adapters_in_use
        del self._registered[ref]
        if all(other.digest != ref.digest for other in self._registered):
            self._slots.pool.discard(ref.digest)

    def info(self, ref: AdapterRef) -> SimpleNamespace:
        if ref not in self._registered:
            raise AdapterNotFound("the adapter is not registered")
        return SimpleNamespace(activation=self._registered[ref], frontier=FRONTIERS[ref.adapter_id])

    def manifest(self, ref: AdapterRef) -> SimpleNamespace:
        return SimpleNamespace(invocation_tokens=INVOCATION)

    def is_ready(self, ref: AdapterRef) -> bool:
        self.info(ref)
        return self._slots.is_ready(ref)

    def prepare(self, ref: AdapterRef) -> bool:
        self.info(ref)
        return self._slots.prepare(ref)

    def load_error(self, ref: AdapterRef) -> None:
        return None

    def stats(self) -> AdapterStats:
        return AdapterStats()

    def close(self) -> None:
        pass


def _usual(ref: AdapterRef) -> Activation:
    return ACTIVATIONS.get(ref.adapter_id, Activation.ALWAYS)

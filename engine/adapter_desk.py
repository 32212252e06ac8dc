"""AdapterDesk: adapters come and go beside the running engine."""

import logging
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from loraplex.adapters.errors import AdapterError, AdapterNotFound, AdapterRejected
from loraplex.adapters.manager import LoRAManager, LoRAStats, RegisteredAdapter
from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import (
    AdapterInfo,
    AdapterRegistered,
    AdapterUnregistered,
    FailureCode,
    RegisterAdapter,
    RequestFailed,
    UnregisterAdapter,
)

logger = logging.getLogger(__name__)

Outcome = AdapterRegistered | AdapterUnregistered | RequestFailed


class AdapterDesk:
    """Reads adapters on a thread of its own, so that no decode step waits for a disk."""

    def __init__(self, lora: LoRAManager) -> None:
        self._lora = lora
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-register")
        self._registering: list[tuple[str, Future[RegisteredAdapter]]] = []
        self._unregistering: list[UnregisterAdapter] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._registering or self._unregistering)

    def register(self, command: RegisterAdapter) -> None:
        future = self._reader.submit(
            self._lora.register,
            command.tenant,
            command.adapter_id,
            Path(command.path),
            allow_base_mismatch=command.allow_base_mismatch,
        )
        self._registering.append((command.request_id, future))

    def unregister(self, command: UnregisterAdapter) -> None:
        self._unregistering.append(command)

    def outcomes(self, in_use: Set[AdapterRef]) -> list[Outcome]:
        """What was decided since the last call. `in_use`: adapters that sequences still need."""
        done = [(id_, future) for id_, future in self._registering if future.done()]
        self._registering = [item for item in self._registering if item not in done]
        leaving = [c for c in self._unregistering if c.adapter not in in_use]
        self._unregistering = [c for c in self._unregistering if c.adapter in in_use]
        return [
            *(_registered(id_, future) for id_, future in done),
            *map(self._unregister, leaving),
        ]

    def is_loaded(self, ref: AdapterRef | None) -> bool:
        return ref is None or self._lora.prepare(ref)

    def load_error(self, ref: AdapterRef | None) -> AdapterError | None:
        return None if ref is None else self._lora.load_error(ref)

    def invocation_tokens(self, ref: AdapterRef | None) -> list[int] | None:
        """Of an activated LoRA; None for every other adapter and the base.

        Raises:
            RequestRejected: when the engine does not know the adapter, or it is being removed.
        """
        if ref is None:
            return None
        try:
            manifest = self._lora.manifest(ref)
        except AdapterNotFound as error:
            raise RequestRejected(FailureCode.ADAPTER_NOT_FOUND, str(error), "model") from error
        if any(command.adapter == ref for command in self._unregistering):
            message = "The adapter is being removed."
            raise RequestRejected(FailureCode.ADAPTER_NOT_FOUND, message, "model")
        return manifest.invocation_tokens

    def stats(self) -> LoRAStats:
        return self._lora.stats()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._lora.close()

    def _unregister(self, command: UnregisterAdapter) -> Outcome:
        try:
            self._lora.unregister(command.adapter)
        except AdapterError as error:
            return _failed(command.request_id, error)
        return AdapterUnregistered(command.request_id)


def _registered(request_id: str, future: Future[RegisteredAdapter]) -> Outcome:
    try:
        adapter = future.result()
    except AdapterError as error:
        return _failed(request_id, error)
    except Exception:  # whatever one tenant's files provoke stays that registration's failure
        logger.exception("Registration %s failed", request_id)
        message = "The adapter could not be read."
        return RequestFailed(request_id=request_id, code=FailureCode.INTERNAL, message=message)
    return AdapterRegistered(
        request_id,
        AdapterInfo(
            ref=adapter.ref,
            rank=adapter.rank,
            target_modules=list(adapter.target_modules),
            num_modules=adapter.num_modules,
            num_bytes=adapter.num_bytes,
            activation=adapter.activation,
            base_model=adapter.base_model,
            base_mismatch=adapter.base_mismatch,
        ),
    )


def _failed(request_id: str, error: AdapterError) -> RequestFailed:
    code = FailureCode.ADAPTER_UNAVAILABLE
    faults: list[str] = []
    if isinstance(error, AdapterNotFound):
        code = FailureCode.ADAPTER_NOT_FOUND
    elif isinstance(error, AdapterRejected):
        code, faults = FailureCode.ADAPTER_REJECTED, error.faults
    return RequestFailed(request_id=request_id, code=code, message=str(error), faults=faults)

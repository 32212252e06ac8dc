"""AdapterCommands: registers and removes adapters beside the running engine."""

import logging
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loraplex.adapters.errors import AdapterError, AdapterNotFound, AdapterRejected
from loraplex.adapters.manifest import (
    Activation,
    AdapterManifest,
    AdapterRef,
    AdapterStats,
    Folder,
    Stored,
)
from loraplex.adapters.registration import RegisteredAdapter, StoredCopy
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import (
    AdapterInfo,
    AdapterRegistered,
    AdapterUnregistered,
    BasePromptRef,
    FailureCode,
    RegisterAdapter,
    RequestFailed,
    UnregisterAdapter,
)

logger = logging.getLogger(__name__)

Outcome = AdapterRegistered | AdapterUnregistered | RequestFailed


class AdapterRegistry(Protocol):
    """The part of the LoRA manager that registers adapters and tells of registered ones."""

    def register(
        self,
        tenant: str,
        adapter_id: str,
        source: Path | StoredCopy,
        *,
        allow_base_mismatch: bool,
        activation: Activation | None,
    ) -> RegisteredAdapter: ...
    def unregister(self, ref: AdapterRef) -> None: ...
    def info(self, ref: AdapterRef) -> RegisteredAdapter: ...
    def manifest(self, ref: AdapterRef) -> AdapterManifest: ...
    def is_ready(self, ref: AdapterRef) -> bool: ...
    def load_error(self, ref: AdapterRef) -> AdapterError | None: ...
    def stats(self) -> AdapterStats: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class AdapterTerms:
    """How an adapter is applied; the defaults are the base model's."""

    activation: Activation = Activation.ALWAYS
    invocation_tokens: list[int] | None = None
    frontier: int = 0
    base_prompt: BasePromptRef | None = None


class AdapterCommands:
    """Reads adapters on a thread of its own, so that no decode step waits for a disk."""

    def __init__(self, lora: AdapterRegistry) -> None:
        self._lora = lora
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-register")
        self._registering: list[tuple[RegisterAdapter, Future[RegisteredAdapter]]] = []
        self._unregistering: list[UnregisterAdapter] = []
        self._base_prompts: dict[AdapterRef, BasePromptRef | None] = {}  # of registered adapters

    @property
    def is_busy(self) -> bool:
        return bool(self._registering or self._unregistering)

    def register(self, command: RegisterAdapter) -> None:
        future = self._reader.submit(
            self._lora.register,
            command.tenant,
            command.adapter_id,
            _source(command.source),
            allow_base_mismatch=command.allow_base_mismatch,
            activation=command.activation,
        )
        self._registering.append((command, future))

    def unregister(self, command: UnregisterAdapter) -> None:
        self._unregistering.append(command)

    def outcomes(self, in_use: Set[AdapterRef]) -> list[Outcome]:
        """Returns the outcomes since the last call. `in_use`: adapters that sequences still
        need."""
        done = [item for item in self._registering if item[1].done()]
        self._registering = [item for item in self._registering if item not in done]
        leaving = [c for c in self._unregistering if c.adapter not in in_use]
        self._unregistering = [c for c in self._unregistering if c.adapter in in_use]
        return [
            *(self._registered(command, future) for command, future in done),
            *map(self._unregister, leaving),
        ]

    def is_loaded(self, ref: AdapterRef | None) -> bool:
        return ref is None or self._lora.is_ready(ref)

    def load_error(self, ref: AdapterRef | None) -> AdapterError | None:
        return None if ref is None else self._lora.load_error(ref)

    def terms(self, ref: AdapterRef | None) -> AdapterTerms:
        """Returns how to apply an adapter, or the base model for None.

        Raises:
            RequestRejected: when the engine does not know the adapter, or it is being removed.
        """
        if ref is None:
            return AdapterTerms()
        try:
            info, manifest = self._lora.info(ref), self._lora.manifest(ref)
        except AdapterNotFound as error:
            raise RequestRejected(FailureCode.ADAPTER_NOT_FOUND, str(error), "model") from error
        if any(command.adapter == ref for command in self._unregistering):
            message = "The adapter is being removed."
            raise RequestRejected(FailureCode.ADAPTER_NOT_FOUND, message, "model")
        return AdapterTerms(
            info.activation, manifest.invocation_tokens, info.frontier, self._base_prompts.get(ref)
        )

    def stats(self) -> AdapterStats:
        return self._lora.stats()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._lora.close()

    def _unregister(self, command: UnregisterAdapter) -> Outcome:
        try:
            self._lora.unregister(command.adapter)
        except AdapterError as error:
            return _failed(command.request_id, error)
        self._base_prompts.pop(command.adapter, None)
        return AdapterUnregistered(command.request_id)

    def _registered(
        self, command: RegisterAdapter, future: Future[RegisteredAdapter]
    ) -> AdapterRegistered | RequestFailed:
        try:
            adapter = future.result()
            if (
                self._base_prompts.setdefault(adapter.ref, command.base_prompt)
                != command.base_prompt
            ):
                raise AdapterRejected(
                    ["the adapter is registered with another base prompt; unregister it first"]
                )
        except AdapterError as error:
            return _failed(command.request_id, error)
        except Exception:  # whatever one tenant's files provoke stays that registration's failure
            logger.exception("Registration %s failed", command.request_id)
            message = "The adapter could not be read."
            return RequestFailed(
                request_id=command.request_id, code=FailureCode.INTERNAL, message=message
            )
        info = _describe(adapter, command.base_prompt)
        return AdapterRegistered(command.request_id, info)


def _source(source: Folder | Stored) -> Path | StoredCopy:
    if isinstance(source, Folder):
        return Path(source.path)
    return StoredCopy(source.digest, Path(source.origin) if source.origin else None)


def _describe(adapter: RegisteredAdapter, base_prompt: BasePromptRef | None) -> AdapterInfo:
    return AdapterInfo(
        ref=adapter.ref,
        rank=adapter.rank,
        target_modules=list(adapter.target_modules),
        num_modules=adapter.num_modules,
        num_bytes=adapter.num_bytes,
        activation=adapter.activation,
        frontier=adapter.frontier,
        base_prompt=base_prompt,
        base_model=adapter.base_model,
        base_mismatch=adapter.base_mismatch,
    )


def _failed(request_id: str, error: AdapterError) -> RequestFailed:
    code = FailureCode.ADAPTER_UNAVAILABLE
    faults: list[str] = []
    if isinstance(error, AdapterNotFound):
        code = FailureCode.ADAPTER_NOT_FOUND
    elif isinstance(error, AdapterRejected):
        code, faults = FailureCode.ADAPTER_REJECTED, error.faults
    return RequestFailed(request_id=request_id, code=code, message=str(error), faults=faults)

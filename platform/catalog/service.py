"""Catalog: which names a tenant may call, and what each stands for."""

import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.manifest import Activation, AdapterRef, Folder, Stored
from loraplex.engine.client import EngineClient
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import (
    AdapterInfo,
    RegisterAdapter,
    UnregisterAdapter,
)
from loraplex.platform.auth.principal import Principal, TenantId
from loraplex.platform.catalog.adapter_text import NO_TEXT, AdapterText
from loraplex.platform.catalog.base_prompts import BasePrompt
from loraplex.platform.errors import Conflict, ModelNotFound, Unavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What a name stands for."""

    name: str
    created: int  # Unix seconds
    adapter: AdapterRef | None = None  # None: the base model
    parent: str | None = None  # an adapter's base
    activation: Activation | None = None  # from where on an adapter acts
    base_prompt: str | None = None  # for requests that name none
    fault: str | None = None  # why it cannot be served now
    text: AdapterText = NO_TEXT


@dataclass(frozen=True)
class AdapterSource:
    """A PEFT folder, and how it is to be served."""

    name: str
    folder: Path
    allow_base_mismatch: bool = False
    activation: Activation | None = None  # None: as it was trained
    base_prompt: BasePrompt | None = None  # for requests that name none
    text: AdapterText = NO_TEXT


@dataclass(frozen=True)
class _Entry:
    model: Model
    source: AdapterSource
    info: AdapterInfo | None  # None: no engine has ever taken it


Outcome = tuple[str | None, AdapterInfo | None]  # why it cannot be served, what the engine knows


class Catalog:
    """Names are a tenant's own; the base model's name is everybody's.

    Args:
        base_name: the served name of the base model.
    """

    def __init__(self, base_name: str) -> None:
        self.base = Model(base_name, int(time.time()))
        self._entries: dict[tuple[TenantId, str], _Entry] = {}
        self._reserved: set[tuple[TenantId, str]] = set()

    def list(self, principal: Principal) -> list[Model]:
        """The base first, then the tenant's adapters by name, with those that cannot be served."""
        own = [entry.model for key, entry in self._entries.items() if key[0] == principal.tenant]
        return [self.base, *sorted(own, key=lambda model: model.name)]

    def resolve(self, principal: Principal, name: str) -> Model:
        """What a name stands for.

        Raises:
            ModelNotFound: the tenant has no such name.
            Unavailable: the engine lacks the adapter; with the reason.
        """
        if name == self.base.name:
            return self.base
        entry = self._entries.get((principal.tenant, name))
        if entry is None:
            raise ModelNotFound(name)
        if entry.model.fault is not None:
            raise Unavailable(
                f"The model '{name}' cannot be served now: {entry.model.fault}",
                "model",
                "adapter_unavailable",
            )
        return entry.model

    def has(self, tenant: TenantId, name: str) -> bool:
        return (tenant, name) in self._entries

    async def register(
        self, engine: EngineClient, tenant: TenantId, adapter: AdapterSource
    ) -> Model:
        """Has the engine read a PEFT folder, and gives it a name.

        Raises:
            Conflict: if the name is taken.
            RequestRejected: with all that is wrong with the adapter.
            EngineUnavailable: if there is no engine to read it.
        """
        key = (tenant, adapter.name)
        self._reserve(key)
        try:
            command = _first_registration(tenant, adapter)
            info = await engine.register_adapter(command)
        finally:
            self._reserved.discard(key)
        return self._enter(key, adapter, info)

    def add_failed(self, tenant: TenantId, adapter: AdapterSource, fault: str) -> None:
        """Keeps the name of an adapter that was refused, and says why to whoever calls it.

        Raises:
            Conflict: if the name is taken.
        """
        key = (tenant, adapter.name)
        self._reserve(key)
        self._reserved.discard(key)
        self._enter(key, adapter, None, fault)
        _log_failure(key, fault)

    async def unregister(self, engine: EngineClient, principal: Principal, name: str) -> None:
        """The name is gone at once; requests that run on the adapter end as they began.

        Raises:
            ModelNotFound: if the tenant has no adapter of this name.
            EngineUnavailable: if the engine ended meanwhile; the name is gone all the same.
        """
        entry = self._entries.pop((principal.tenant, name), None)
        if entry is None:
            raise ModelNotFound(name)
        if entry.info is not None:
            await engine.unregister_adapter(
                UnregisterAdapter(request_id=_new_id(), adapter=entry.info.ref)
            )

    async def restore(self, engine: EngineClient) -> None:
        """Registers every adapter with a new engine, from the store; the folder that it came from
        is asked only where the stored copy is damaged.

        One that the engine refuses now, or that has become another, is not served. Those that were
        refused before are tried once more.

        Raises:
            EngineUnavailable: if that engine ends too.
        """
        for key, entry in list(self._entries.items()):
            if entry.info is None:
                fault, info = await self._register_at_last(engine, key[0], entry.source)
            else:
                fault, info = await self._register_again(engine, entry.info, entry.source)
            if fault is not None:
                _log_failure(key, fault)
            if key in self._entries:
                self._enter(key, entry.source, info, fault)

    async def _register_at_last(
        self, engine: EngineClient, tenant: TenantId, source: AdapterSource
    ) -> Outcome:
        try:
            return None, await engine.register_adapter(_first_registration(tenant, source))
        except RequestRejected as error:
            return error.message, None

    async def _register_again(
        self, engine: EngineClient, info: AdapterInfo, source: AdapterSource
    ) -> Outcome:
        command = RegisterAdapter(
            request_id=_new_id(),
            tenant=info.ref.tenant,
            adapter_id=info.ref.adapter_id,
            source=Stored(info.ref.digest, str(source.folder)),
            allow_base_mismatch=True,  # it was judged when it came
            activation=info.activation,
            base_prompt=info.base_prompt,
        )
        try:
            found = await engine.register_adapter(command)
        except RequestRejected as error:
            return error.message, info
        if found.ref == info.ref:
            return None, found
        await engine.unregister_adapter(UnregisterAdapter(request_id=_new_id(), adapter=found.ref))
        return "The stored copy has changed.", info

    def _reserve(self, key: tuple[TenantId, str]) -> None:
        _, name = key
        if name == self.base.name or key in self._entries or key in self._reserved:
            raise Conflict(f"There is a model '{name}' already.", "name")
        self._reserved.add(key)

    def _enter(
        self,
        key: tuple[TenantId, str],
        source: AdapterSource,
        info: AdapterInfo | None,
        fault: str | None = None,
    ) -> Model:
        known = self._entries.get(key)
        model = Model(
            source.name,
            known.model.created if known else int(time.time()),
            info.ref if info else None,
            self.base.name,
            info.activation if info else source.activation,
            source.base_prompt.name if source.base_prompt else None,
            fault,
            source.text,
        )
        self._entries[key] = _Entry(model, source, info)
        return model


def _first_registration(tenant: TenantId, adapter: AdapterSource) -> RegisterAdapter:
    return RegisterAdapter(
        request_id=_new_id(),
        tenant=tenant,
        adapter_id=f"adp_{uuid.uuid4().hex}",
        source=Folder(str(adapter.folder)),
        allow_base_mismatch=adapter.allow_base_mismatch,
        activation=adapter.activation,
        base_prompt=adapter.base_prompt.ref if adapter.base_prompt else None,
    )


def _log_failure(key: tuple[TenantId, str], fault: str) -> None:
    tenant, name = key
    logger.warning("The adapter %s of tenant %s cannot be served: %s", name, tenant, fault)


def _new_id() -> str:
    return f"catalog-{uuid.uuid4().hex}"

"""Catalog: which names a tenant may call, and what each stands for."""

import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapters.manifest import Activation, AdapterRef
from loraplex.engine.client import EngineClient
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import AdapterInfo, RegisterAdapter, UnregisterAdapter
from loraplex.platform.auth.principal import Principal, TenantId
from loraplex.platform.catalog.base_prompts import BasePrompt
from loraplex.platform.errors import Conflict, ModelNotFound, Unavailable


@dataclass(frozen=True)
class Model:
    """What a name stands for."""

    name: str
    created: int  # Unix seconds
    adapter: AdapterRef | None = None  # None: the base model
    parent: str | None = None  # an adapter's base
    activation: Activation | None = None  # from where on an adapter acts
    base_prompt: str | None = None  # for requests that name none


@dataclass(frozen=True)
class AdapterSource:
    """A PEFT folder, and how it is to be served."""

    name: str
    folder: Path
    allow_base_mismatch: bool = False
    activation: Activation | None = None  # None: as it was trained
    base_prompt: BasePrompt | None = None  # for requests that name none


@dataclass(frozen=True)
class _Entry:
    model: Model
    info: AdapterInfo
    fault: str | None = None  # why the engine lacks it


class Catalog:
    """Names are a tenant's own; the base model's name is everybody's.

    Args:
        base_name: the served name of the base model.
        adapter_store: the folder where the engine keeps its copies, by digest.
    """

    def __init__(self, base_name: str, adapter_store: Path) -> None:
        self.base = Model(base_name, int(time.time()))
        self._store = adapter_store
        self._entries: dict[tuple[TenantId, str], _Entry] = {}
        self._reserved: set[tuple[TenantId, str]] = set()

    def list(self, principal: Principal) -> list[Model]:
        """The base first, then the tenant's adapters by name."""
        own = (entry for key, entry in self._entries.items() if key[0] == principal.tenant)
        adapters = (entry.model for entry in own if entry.fault is None)
        return [self.base, *sorted(adapters, key=lambda model: model.name)]

    def resolve(self, principal: Principal, name: str) -> Model:
        """Raises ModelNotFound, or Unavailable where the engine lacks the adapter."""
        if name == self.base.name:
            return self.base
        entry = self._entries.get((principal.tenant, name))
        if entry is None:
            raise ModelNotFound(name)
        if entry.fault is not None:
            raise Unavailable(
                f"The model '{name}' cannot be served now.", "model", "adapter_unavailable"
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
        name = adapter.name
        key = (tenant, name)
        if name == self.base.name or key in self._entries or key in self._reserved:
            raise Conflict(f"There is a model '{name}' already.", "name")
        self._reserved.add(key)
        try:
            info = await engine.register_adapter(
                RegisterAdapter(
                    request_id=_new_id(),
                    tenant=tenant,
                    adapter_id=f"adp_{uuid.uuid4().hex}",
                    path=str(adapter.folder),
                    allow_base_mismatch=adapter.allow_base_mismatch,
                    activation=adapter.activation,
                    base_prompt=adapter.base_prompt.ref if adapter.base_prompt else None,
                )
            )
        finally:
            self._reserved.discard(key)
        model = Model(
            name,
            int(time.time()),
            info.ref,
            self.base.name,
            info.activation,
            adapter.base_prompt.name if adapter.base_prompt else None,
        )
        self._entries[key] = _Entry(model, info)
        return model

    async def unregister(self, engine: EngineClient, principal: Principal, name: str) -> None:
        """The name is gone at once; requests that run on the adapter end as they began.

        Raises:
            ModelNotFound: if the tenant has no adapter of this name.
            EngineUnavailable: if the engine ended meanwhile; the name is gone all the same.
        """
        entry = self._entries.pop((principal.tenant, name), None)
        if entry is None:
            raise ModelNotFound(name)
        await engine.unregister_adapter(
            UnregisterAdapter(request_id=_new_id(), adapter=entry.info.ref)
        )

    async def restore(self, engine: EngineClient) -> None:
        """Registers every adapter with a new engine, from the store and not from where it came.

        One that the engine refuses now, or that has become another, is not served.

        Raises:
            EngineUnavailable: if that engine ends too.
        """
        for key, entry in list(self._entries.items()):
            fault = await self._register_again(engine, entry.info)
            if key in self._entries:
                self._entries[key] = replace(entry, fault=fault)

    async def _register_again(self, engine: EngineClient, info: AdapterInfo) -> str | None:
        command = RegisterAdapter(
            request_id=_new_id(),
            tenant=info.ref.tenant,
            adapter_id=info.ref.adapter_id,
            path=str(self._store / info.ref.digest),
            allow_base_mismatch=info.base_mismatch,
            activation=info.activation,
            base_prompt=info.base_prompt,
        )
        try:
            found = await engine.register_adapter(command)
        except RequestRejected as error:
            return error.message
        if found.ref == info.ref:
            return None
        await engine.unregister_adapter(UnregisterAdapter(request_id=_new_id(), adapter=found.ref))
        return "The stored copy has changed."


def _new_id() -> str:
    return f"catalog-{uuid.uuid4().hex}"

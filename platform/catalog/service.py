"""Catalog: which names a tenant may call, and what each stands for."""

import logging
import time
import uuid
from dataclasses import dataclass, replace

from loraplex.adapters.manifest import Activation, AdapterRef, Folder, Stored
from loraplex.engine.client import EngineClient
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import AdapterInfo, RegisterAdapter, UnregisterAdapter
from loraplex.platform.auth.principal import Principal, TenantId
from loraplex.platform.catalog.adapter_text import NO_TEXT, AdapterText
from loraplex.platform.catalog.store import AdapterSource, CatalogStore, Entry, name_taken
from loraplex.platform.errors import Conflict, ModelNotFound, Unavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What a name stands for."""

    name: str
    created: int  # Unix seconds
    adapter: AdapterRef | None = None  # None: the base model
    parent: str | None = None  # an adapter's base model
    activation: Activation | None = None  # from where on an adapter acts
    base_prompt: str | None = None  # for requests that name none
    fault: str | None = None  # why the adapter cannot be served now
    text: AdapterText = NO_TEXT


class Catalog:
    """Names adapters within a tenant; the base model's name belongs to all tenants.

    Args:
        base_name: the served name of the base model.
        store: holds the tenants' adapters.
    """

    def __init__(self, base_name: str, store: CatalogStore) -> None:
        self.base = Model(base_name, int(time.time()))
        self._store = store
        self._reserved: set[tuple[TenantId, str]] = set()  # names that are being registered

    async def list(self, principal: Principal) -> list[Model]:
        """Returns the base model, then the tenant's adapters by name, failed ones included."""
        return [self.base, *map(self._model, await self._store.of_tenant(principal.tenant))]

    async def resolve(self, principal: Principal, name: str) -> Model:
        """Returns what a name stands for.

        Raises:
            ModelNotFound: if the tenant has no such name.
            Unavailable: with the reason, if the engine lacks the adapter.
        """
        if name == self.base.name:
            return self.base
        entry = await self._store.get(principal.tenant, name)
        if entry is None:
            raise ModelNotFound(name)
        if entry.fault is not None:
            raise Unavailable(
                f"The model '{name}' cannot be served now: {entry.fault}",
                "model",
                "adapter_unavailable",
            )
        return self._model(entry)

    async def has(self, tenant: TenantId, name: str) -> bool:
        return await self._store.get(tenant, name) is not None

    async def register(
        self, engine: EngineClient, tenant: TenantId, adapter: AdapterSource
    ) -> Model:
        """Registers a PEFT folder with the engine, and gives the adapter a name.

        Raises:
            Conflict: if the name is taken.
            RequestRejected: with every fault of the adapter.
            EngineUnavailable: if no engine is there to read the folder.
        """
        await self._refuse_taken(tenant, adapter.name)
        self._reserved.add((tenant, adapter.name))
        try:
            info = await engine.register_adapter(_first_registration(tenant, adapter))
            entry = Entry(tenant, adapter, int(time.time()), info)
            await self._add(engine, entry)
        finally:
            self._reserved.discard((tenant, adapter.name))
        return self._model(entry)

    async def add_failed(self, tenant: TenantId, adapter: AdapterSource, fault: str) -> None:
        """Names an adapter that was refused, so that its callers are told why.

        Raises:
            Conflict: if the name is taken.
        """
        await self._refuse_taken(tenant, adapter.name)
        entry = Entry(tenant, adapter, int(time.time()), fault=fault)
        await self._store.add(entry)
        _log_failure(entry)

    async def unregister(self, engine: EngineClient, principal: Principal, name: str) -> None:
        """Removes a name at once; requests that run on its adapter are not interrupted.

        Raises:
            ModelNotFound: if the tenant has no adapter of this name.
            EngineUnavailable: if the engine ended meanwhile; the name is removed all the same.
        """
        entry = await self._store.remove(principal.tenant, name)
        if entry is None:
            raise ModelNotFound(name)
        if entry.info is not None:
            await _unregister(engine, entry.info)

    async def restore(self, engine: EngineClient) -> None:
        """Registers every adapter with a new engine, from the store of adapters; the original
        folder is read only where the stored copy is damaged.

        An adapter that the engine refuses now, or whose content has changed, is not served. An
        adapter that was refused before is tried once more.

        Raises:
            EngineUnavailable: if that engine ends too.
        """
        for known in await self._store.all():
            entry = await _registered(engine, known)
            if entry.fault is not None:
                _log_failure(entry)
            is_replaced = await self._store.replace(known, entry)
            if not is_replaced and known.info is None and entry.info is not None:
                await _unregister(engine, entry.info)  # its name was removed meanwhile

    async def _refuse_taken(self, tenant: TenantId, name: str) -> None:
        is_reserved = name == self.base.name or (tenant, name) in self._reserved
        if is_reserved or await self.has(tenant, name):
            raise name_taken(name)

    async def _add(self, engine: EngineClient, entry: Entry) -> None:
        try:
            await self._store.add(entry)
        except Conflict:
            if entry.info is not None:
                await _unregister(engine, entry.info)
            raise

    def _model(self, entry: Entry) -> Model:
        source, info = entry.source, entry.info
        return Model(
            name=entry.name,
            created=entry.created,
            adapter=info.ref if info else None,
            parent=self.base.name,
            activation=info.activation if info else source.activation,
            base_prompt=source.base_prompt.name if source.base_prompt else None,
            fault=entry.fault,
            text=source.text,
        )


async def _registered(engine: EngineClient, entry: Entry) -> Entry:
    """Registers an adapter with a new engine, and returns its entry from then on."""
    if entry.info is None:
        command = _first_registration(entry.tenant, entry.source)
    else:
        command = _registration_of_stored(entry.info, entry.source)
    try:
        found = await engine.register_adapter(command)
    except RequestRejected as rejection:
        return replace(entry, fault=rejection.message)
    if entry.info is None or found.ref == entry.info.ref:
        return replace(entry, info=found, fault=None)
    await _unregister(engine, found)
    return replace(entry, fault="The stored copy has changed.")


async def _unregister(engine: EngineClient, info: AdapterInfo) -> None:
    await engine.unregister_adapter(UnregisterAdapter(request_id=_new_id(), adapter=info.ref))


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


def _registration_of_stored(info: AdapterInfo, source: AdapterSource) -> RegisterAdapter:
    return RegisterAdapter(
        request_id=_new_id(),
        tenant=info.ref.tenant,
        adapter_id=info.ref.adapter_id,
        source=Stored(info.ref.digest, str(source.folder)),
        allow_base_mismatch=True,  # the first registration has judged it
        activation=info.activation,
        base_prompt=info.base_prompt,
    )


def _log_failure(entry: Entry) -> None:
    logger.warning(
        "The adapter %s of tenant %s cannot be served: %s", entry.name, entry.tenant, entry.fault
    )


def _new_id() -> str:
    return f"catalog-{uuid.uuid4().hex}"

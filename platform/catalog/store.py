"""CatalogStore: which adapters each tenant has, by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loraplex.adapters.manifest import Activation
from loraplex.engine.protocol import AdapterInfo
from loraplex.platform.auth.principal import TenantId
from loraplex.platform.catalog.adapter_text import NO_TEXT, AdapterText
from loraplex.platform.catalog.base_prompts import BasePrompt
from loraplex.platform.errors import Conflict


@dataclass(frozen=True)
class AdapterSource:
    """A PEFT folder, and how its adapter is to be served."""

    name: str
    folder: Path
    allow_base_mismatch: bool = False
    activation: Activation | None = None  # None: as it was trained
    base_prompt: BasePrompt | None = None  # for requests that name none
    text: AdapterText = NO_TEXT


@dataclass(frozen=True)
class Entry:
    """One adapter of a tenant, whether it can be served or not."""

    tenant: TenantId
    source: AdapterSource
    created: int  # Unix seconds
    info: AdapterInfo | None = None  # None: no engine has ever accepted the adapter
    fault: str | None = None  # why the adapter cannot be served now

    @property
    def name(self) -> str:
        return self.source.name


class CatalogStore(Protocol):
    """Entries by tenant and name; an adapter that failed keeps its name."""

    async def get(self, tenant: TenantId, name: str) -> Entry | None:
        """Returns a tenant's entry, or None if the tenant has none of this name."""

    async def of_tenant(self, tenant: TenantId) -> list[Entry]:
        """Returns a tenant's entries, ordered by name."""

    async def all(self) -> list[Entry]:
        """Returns every tenant's entries, in the order in which they were added."""

    async def add(self, entry: Entry) -> None:
        """Adds an entry under a free name.

        Raises:
            Conflict: if the tenant has an entry of this name.
        """

    async def replace(self, known: Entry, entry: Entry) -> bool:
        """Puts an entry in the place of `known`, which has the same tenant and name.

        Returns:
            False, with nothing changed, if `known` has been removed or replaced meanwhile.
        """

    async def remove(self, tenant: TenantId, name: str) -> Entry | None:
        """Removes an entry and returns it, or None if the tenant has none of this name."""


class InMemoryCatalog:
    """A `CatalogStore` that ends with the process."""

    def __init__(self) -> None:
        self._entries: dict[tuple[TenantId, str], Entry] = {}

    async def get(self, tenant: TenantId, name: str) -> Entry | None:
        """As `CatalogStore.get`."""
        return self._entries.get((tenant, name))

    async def of_tenant(self, tenant: TenantId) -> list[Entry]:
        """As `CatalogStore.of_tenant`."""
        own = (entry for entry in self._entries.values() if entry.tenant == tenant)
        return sorted(own, key=lambda entry: entry.name)

    async def all(self) -> list[Entry]:
        """As `CatalogStore.all`."""
        return list(self._entries.values())

    async def add(self, entry: Entry) -> None:
        """As `CatalogStore.add`."""
        if (entry.tenant, entry.name) in self._entries:
            raise name_taken(entry.name)
        self._entries[entry.tenant, entry.name] = entry

    async def replace(self, known: Entry, entry: Entry) -> bool:
        """As `CatalogStore.replace`."""
        key = (known.tenant, known.name)
        is_known = self._entries.get(key) == known
        if is_known:
            self._entries[key] = entry
        return is_known

    async def remove(self, tenant: TenantId, name: str) -> Entry | None:
        """As `CatalogStore.remove`."""
        return self._entries.pop((tenant, name), None)


def name_taken(name: str) -> Conflict:
    return Conflict(f"There is a model '{name}' already.", "name")

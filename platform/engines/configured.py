"""Configured: the base prompts and adapters that the settings name."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import PromptRejected, RequestRejected
from loraplex.platform.auth.principal import TenantId
from loraplex.platform.catalog.adapter_text import AdapterText
from loraplex.platform.catalog.base_prompts import BasePrompts, read_prompts
from loraplex.platform.catalog.service import Catalog
from loraplex.platform.catalog.store import AdapterSource
from loraplex.platform.config import Settings
from loraplex.platform.errors import Conflict
from loraplex.platform.inference.prompts.served_tokenizer import ServedTokenizer

logger = logging.getLogger(__name__)


class Configured:
    """Publishes and registers what the settings name, with the first engine that is ready.

    Args:
        tenant: to whom the settings' adapters belong.

    Raises:
        SettingsRefused: with every fault of the files of base prompts.
    """

    def __init__(
        self,
        settings: Settings,
        tenant: TenantId,
        catalog: Catalog,
        base_prompts: BasePrompts,
        tokenizer: ServedTokenizer,
    ) -> None:
        self._settings = settings
        self._tenant = tenant
        self._catalog = catalog
        self._base_prompts = base_prompts
        self._tokenizer = tokenizer
        self._prompt_sources = read_prompts(settings.base_prompts)

    async def add_to(self, engine: EngineClient) -> list[str]:
        """Adds what an engine lacks of the settings, and returns the faults that end a start."""
        return await self._publish_prompts(engine) or await self._register_adapters(engine)

    def adapter_source(self, name: str, folder: Path) -> AdapterSource:
        """Returns an adapter's folder, to be served as the settings say for its name."""
        settings = self._settings
        prompt = settings.adapter_base_prompts.get(name)
        return AdapterSource(
            name,
            folder.resolve(),  # the operator may name a link; links inside the folder are refused
            settings.allow_base_mismatch,
            settings.adapter_activations.get(name),
            None if prompt is None else self._base_prompts.resolve(prompt),
        )

    async def _publish_prompts(self, engine: EngineClient) -> list[str]:
        """Publishes the base prompts that are not published yet, and returns all faults."""
        faults, known = [], self._base_prompts
        new = {name: it for name, it in self._prompt_sources.items() if not known.has(name)}
        for name, source in new.items():
            try:
                await known.publish(engine, self._tokenizer.get(), name, source)
            except (PromptRejected, RequestRejected) as rejection:
                faults.append(f"Base prompt {name}: {rejection.message}")
        return faults

    async def _register_adapters(self, engine: EngineClient) -> list[str]:
        """Registers the adapters that the catalogue lacks, and returns all faults."""
        missing = [
            (name, folder)
            for name, folder in self._settings.adapters.items()
            if not await self._catalog.has(self._tenant, name)
        ]
        found = await asyncio.gather(*(self._register(engine, *it) for it in missing))
        return [fault for faults in found for fault in faults]

    async def _register(self, engine: EngineClient, name: str, folder: Path) -> list[str]:
        """Registers an adapter, and returns the faults that end the start."""
        source = self.adapter_source(name, folder)
        try:
            source = replace(source, text=await self._adapter_text(source.folder))
            model = await self._catalog.register(engine, self._tenant, source)
            for note in model.text.notes:
                logger.warning("Adapter %s: %s", name, note)
        except Conflict as conflict:
            return [f"Adapter {name}: {conflict.message}"]
        except RequestRejected as rejection:
            if not self._settings.strict_adapters:
                await self._catalog.add_failed(self._tenant, source, rejection.message)
                return []
            details = rejection.faults or [rejection.message]
            return [f"Adapter {name} ({folder}): {detail}" for detail in details]
        return []

    async def _adapter_text(self, folder: Path) -> AdapterText:
        """Returns what an adapter's folder says about text.

        Raises:
            RequestRejected: for an invalid chat template, if adapters are strict.
        """
        try:
            return await self._tokenizer.read_adapter_text(folder)
        except RequestRejected as rejection:
            if self._settings.strict_adapters:
                raise
            return AdapterText(notes=(f"{rejection.message}; the base model's is used.",))

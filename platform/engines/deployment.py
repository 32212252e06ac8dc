"""Deployment: one engine, and what the API needs around it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fastapi import Request

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import (
    EngineUnavailable,
    PromptRejected,
    RequestRejected,
    StartRefused,
)
from loraplex.engine.protocol import StartProgress
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.supervisor import EngineSupervisor
from loraplex.platform.auth.namespace import kept_namespace
from loraplex.platform.auth.principal import ApiKeyAuthenticator, Authenticator, Principal
from loraplex.platform.catalog.adapter_text import AdapterText
from loraplex.platform.catalog.base_prompts import BasePrompts, read_prompts
from loraplex.platform.catalog.service import Catalog, Model
from loraplex.platform.catalog.store import AdapterSource, InMemoryCatalog
from loraplex.platform.config import Settings
from loraplex.platform.data_folder import writable_folder
from loraplex.platform.engines.failover import Failover
from loraplex.platform.engines.reconciler import Reconciler
from loraplex.platform.engines.sockets import prepare_folder, socket_path
from loraplex.platform.errors import Conflict, StartFailed
from loraplex.platform.inference.service import InferenceService
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.quotas.service import InMemoryQuotas
from loraplex.platform.usage.accounting import Accounting
from loraplex.platform.usage.sink import InMemoryUsage, UsageSink

logger = logging.getLogger(__name__)


class Deployment:
    """One engine with its catalogue, accounting and metrics; the application starts and stops it.

    Args:
        settings: with an API key.
        on_progress: called with the progress of the engine's start.

    Raises:
        SettingsRefused: if settings conflict, or the data folder cannot be used.
    """

    def __init__(
        self, settings: Settings, on_progress: Callable[[StartProgress], None] | None = None
    ) -> None:
        self.settings = settings
        authenticator = ApiKeyAuthenticator(
            settings.key, kept_namespace(settings.home_folder), settings.operators_key
        )
        self.authenticator: Authenticator = authenticator
        self.default_principal = authenticator.principal  # of what the settings name
        self.catalog = Catalog(settings.served_model_name, InMemoryCatalog())
        self.base_prompts = BasePrompts()
        self._prompt_sources = read_prompts(settings.base_prompts)
        self._socket = socket_path(settings.home_folder)
        prepare_folder(self._socket.parent)
        writable_folder(settings.adapter_store)
        self.engine = EngineClient(f"ipc://{self._socket}", self._prepare, on_progress)
        self.reconciler = Reconciler(self.catalog, self.base_prompts)
        self.failover = Failover(self.engine)
        self.metrics = Metrics(settings.served_model_name, self.failover.stats)
        self.usage: UsageSink = InMemoryUsage()
        self.accounting = Accounting(InMemoryQuotas(settings.max_open_choices), self.usage)
        self.inference = InferenceService(
            self.engine,
            self.catalog,
            self.base_prompts,
            RequestSeeds(settings.seed),
            allow_chat_templates=settings.allow_chat_templates,
        )
        self._supervisor = EngineSupervisor(
            settings.engine_config(), self.engine, limits=settings.hang_limits()
        )
        self._on_progress = on_progress
        self._failed = asyncio.Event()
        self._failure = StartFailed([])

    async def start(self) -> None:
        """Begins to start the engine; `wait_ready` returns when it is ready."""
        if self._on_progress is not None:
            self._on_progress(StartProgress("Loading libraries", 0, 1))
        await self.engine.start()
        self._supervising = asyncio.create_task(self._supervise())
        self._reading = asyncio.create_task(self._read_tokenizer())

    async def stop(self) -> None:
        """Ends the engine and everything that runs on it."""
        self.engine.give_up()
        self._supervising.cancel()
        await asyncio.gather(self._supervising, self._reading, return_exceptions=True)
        await self.engine.close()
        self.inference.close()
        self._socket.unlink(missing_ok=True)

    async def wait_ready(self) -> None:
        """Waits until the engine is ready.

        Raises:
            StartFailed: if the engine is given up, or the server is stopped.
        """
        waits = [
            asyncio.create_task(wait()) for wait in (self.engine.wait_ready, self._failed.wait)
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        self.raise_if_failed()
        if self.engine.is_given_up:
            raise StartFailed(["The server is being stopped."])

    @property
    def is_serving(self) -> bool:
        """Whether the engine is ready and responsive."""
        return self.engine.is_alive and self._supervisor.is_responsive

    async def wait_failed(self) -> None:
        """Returns when the engine is given up, at its start or later."""
        await self._failed.wait()

    def raise_if_failed(self) -> None:
        """Raises StartFailed if the engine has been given up."""
        if self._failed.is_set():
            raise self._failure

    async def register_adapter(self, principal: Principal, name: str, folder: Path) -> Model:
        """Registers a folder of this machine under a name of the principal's tenant.

        Raises:
            Conflict: if the name is taken.
            RequestRejected: with all that is wrong with the adapter.
            EngineUnavailable: if no engine is there to read the folder.
        """
        source = self._adapter_source(name, folder)
        source = replace(source, text=await self.inference.read_adapter_text(source.folder))
        return await self.catalog.register(self.engine, principal.tenant, source)

    async def unregister_adapter(self, principal: Principal, name: str) -> None:
        """Removes a name of the principal's tenant.

        Raises:
            ModelNotFound: if the tenant has no adapter of this name.
            EngineUnavailable: if the engine ended meanwhile; the name is removed all the same.
        """
        await self.catalog.unregister(self.engine, principal, name)

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run()
        except StartRefused as refusal:
            self._fail([refusal.message])
        except Exception:
            logger.exception("The engine's supervisor failed")
            self._fail(["The engine's supervisor failed. The log shows why."])

    async def _prepare(self, engine: EngineClient) -> bool:
        """Makes a new engine ready for requests, and returns whether that succeeded."""
        if engine.info is None:
            raise EngineUnavailable
        await asyncio.wait([self._reading])
        try:
            await self.inference.load_tokenizer(Path(engine.info.tokenizer_path))
        except StartRefused as refusal:
            return self._fail([refusal.message])
        faults = await self.reconciler.restore(engine)
        faults = faults or await self._publish_configured(engine)
        faults = faults or await self._register_configured(engine)
        return self._fail(faults) if faults else True

    async def _read_tokenizer(self) -> None:
        """Loads the tokenizer while the engine starts; the engine later names the right folder."""
        with contextlib.suppress(StartRefused):
            await self.inference.load_tokenizer(self.settings.model.absolute())

    async def _publish_configured(self, engine: EngineClient) -> list[str]:
        """Publishes the new base prompts of the settings, and returns all faults."""
        faults = []
        new = {n: it for n, it in self._prompt_sources.items() if not self.base_prompts.has(n)}
        for name, source in new.items():
            try:
                await self.base_prompts.publish(engine, self.inference.tokenizer, name, source)
            except (PromptRejected, RequestRejected) as rejection:
                faults.append(f"Base prompt {name}: {rejection.message}")
        return faults

    async def _register_configured(self, engine: EngineClient) -> list[str]:
        """Registers the settings' adapters that the catalogue lacks, and returns all faults."""
        tenant = self.default_principal.tenant
        missing = [
            it for it in self.settings.adapters.items() if not await self.catalog.has(tenant, it[0])
        ]
        found = await asyncio.gather(*(self._register(engine, *it) for it in missing))
        return [fault for faults in found for fault in faults]

    async def _register(self, engine: EngineClient, name: str, folder: Path) -> list[str]:
        """Registers an adapter, and returns the faults that end the start."""
        tenant, source = self.default_principal.tenant, self._adapter_source(name, folder)
        try:
            source = replace(source, text=await self._adapter_text(source.folder))
            model = await self.catalog.register(engine, tenant, source)
            for note in model.text.notes:
                logger.warning("Adapter %s: %s", name, note)
        except Conflict as conflict:
            return [f"Adapter {name}: {conflict.message}"]
        except RequestRejected as rejection:
            if not self.settings.strict_adapters:
                await self.catalog.add_failed(tenant, source, rejection.message)
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
            return await self.inference.read_adapter_text(folder)
        except RequestRejected as rejection:
            if self.settings.strict_adapters:
                raise
            return AdapterText(notes=(f"{rejection.message}; the base model's is used.",))

    def _adapter_source(self, name: str, folder: Path) -> AdapterSource:
        settings = self.settings
        prompt = settings.adapter_base_prompts.get(name)
        return AdapterSource(
            name,
            folder.resolve(),  # the operator may name a link; links inside the folder are refused
            settings.allow_base_mismatch,
            settings.adapter_activations.get(name),
            None if prompt is None else self.base_prompts.resolve(prompt),
        )

    def _fail(self, faults: list[str]) -> bool:
        self._failure = StartFailed(faults)
        self._failed.set()
        self.engine.give_up()
        return False


def current_deployment(request: Request) -> Deployment:
    """Returns the application's deployment; a dependency."""
    deployment: Deployment = request.app.state.deployment
    return deployment

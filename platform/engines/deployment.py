"""Deployment: one engine, and what the API needs around it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fastapi import Request

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineUnavailable, StartRefused
from loraplex.engine.protocol import StartProgress
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.supervisor import EngineSupervisor
from loraplex.platform.auth.namespace import kept_namespace
from loraplex.platform.auth.principal import ApiKeyAuthenticator, Authenticator, Principal
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog, Model
from loraplex.platform.catalog.store import InMemoryCatalog
from loraplex.platform.config import Settings
from loraplex.platform.data_folder import writable_folder
from loraplex.platform.engines.configured import Configured
from loraplex.platform.engines.failover import Failover
from loraplex.platform.engines.reconciler import Reconciler
from loraplex.platform.engines.sockets import prepare_folder, socket_path
from loraplex.platform.errors import StartFailed
from loraplex.platform.inference.prompts.served_tokenizer import ServedTokenizer
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
        self._tokenizer = ServedTokenizer()
        self._configured = Configured(
            settings,
            self.default_principal.tenant,
            self.catalog,
            self.base_prompts,
            self._tokenizer,
        )
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
            self._tokenizer,
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
        self._tokenizer.close()
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
        source = self._configured.adapter_source(name, folder)
        source = replace(source, text=await self._tokenizer.read_adapter_text(source.folder))
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
            await self._tokenizer.load(Path(engine.info.tokenizer_path))
        except StartRefused as refusal:
            return self._fail([refusal.message])
        faults = await self.reconciler.restore(engine)
        faults = faults or await self._configured.add_to(engine)
        return self._fail(faults) if faults else True

    async def _read_tokenizer(self) -> None:
        """Loads the tokenizer while the engine starts; the engine later names the right folder."""
        with contextlib.suppress(StartRefused):
            await self._tokenizer.load(self.settings.model.absolute())

    def _fail(self, faults: list[str]) -> bool:
        self._failure = StartFailed(faults)
        self._failed.set()
        self.engine.give_up()
        return False


def current_deployment(request: Request) -> Deployment:
    """Returns the application's deployment; a dependency."""
    deployment: Deployment = request.app.state.deployment
    return deployment

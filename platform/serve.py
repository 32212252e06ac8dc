"""`loraplex serve`: binds the port, starts the server, announces that it is ready, ends cleanly."""

import asyncio
import contextlib
import socket

from rich.console import Console

from loraplex.platform.banner import StartDisplay, banner
from loraplex.platform.config import Settings
from loraplex.platform.engines.deployment import Deployment
from loraplex.platform.errors import StartFailed
from loraplex.platform.http.app import create_app
from loraplex.platform.http.server import HttpServer


async def serve_until_stopped(settings: Settings, console: Console) -> None:
    """Serves until SIGINT or SIGTERM; shows progress on `console`, and prints what to paste.

    Raises:
        SettingsRefused: if settings conflict.
        StartFailed: if the port cannot be bound, or the engine is given up, now or later.
    """
    with bind(settings.host, settings.port) as listener:
        display = StartDisplay(console)
        deployment = Deployment(settings, display.show)
        server = HttpServer(create_app(deployment), settings)
        side_tasks = [
            asyncio.create_task(_announce(deployment, display, listener)),
            asyncio.create_task(_stop_on_failure(deployment, server)),
        ]
        try:
            await server.serve([listener])
        finally:
            display.close()
            for task in side_tasks:
                task.cancel()
            await asyncio.gather(*side_tasks, return_exceptions=True)
        deployment.raise_if_failed()


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        StartFailed: if the address does not exist, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartFailed([f"Cannot listen on {host} port {port}: {error.strerror}"]) from error
    return listener


async def _announce(deployment: Deployment, display: StartDisplay, listener: socket.socket) -> None:
    with contextlib.suppress(StartFailed):
        await deployment.wait_ready()
        display.close()
        host, port = listener.getsockname()[:2]
        models = await deployment.catalog.list(deployment.default_principal)
        names = [model.name for model in models]
        print(banner(host, port, deployment.settings.pasted_key, names), flush=True)  # noqa: T201


async def _stop_on_failure(deployment: Deployment, server: HttpServer) -> None:
    await deployment.wait_failed()
    server.should_exit = True

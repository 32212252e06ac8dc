"""create_app: the HTTP application around one deployment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from loraplex import __version__
from loraplex.platform.catalog import endpoints as adapters
from loraplex.platform.engines.deployment import Deployment
from loraplex.platform.http import operations
from loraplex.platform.http.edge import REQUEST_ID_HEADER, Authentication, BodyLimit, RequestId
from loraplex.platform.http.error_handlers import add_error_handlers
from loraplex.platform.http.openapi import add_openapi
from loraplex.platform.http.shedding import Shedding
from loraplex.platform.inference import endpoints as inference
from loraplex.platform.inference.bodies.route import BodyReader
from loraplex.platform.inference.load import Load


def create_app(deployment: Deployment) -> FastAPI:
    """Returns the application, which starts and stops the deployment with itself."""

    bodies = BodyReader(deployment.settings.max_body_size)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await deployment.start()
        try:
            yield
        finally:
            bodies.close()
            await deployment.stop()

    app = FastAPI(title="Loraplex", version=__version__, lifespan=lifespan)
    app.state.deployment = deployment
    app.state.bodies = bodies
    app.state.load = Load(deployment.settings.max_queue)
    app.state.metrics = operations.latest_metrics(deployment)
    app.state.stopping = asyncio.Event()  # set when running requests must end
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=deployment.settings.max_body_size)
    app.add_middleware(Shedding, refuse_unless_ready=deployment.engine.refuse_unless_ready)
    app.add_middleware(Authentication, authenticator=deployment.authenticator)
    app.add_middleware(RequestId)
    if origins := deployment.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
    app.include_router(inference.router)
    app.include_router(adapters.router)
    app.include_router(operations.router)
    add_openapi(app)
    return app

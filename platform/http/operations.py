"""The operator's routes /health, /ping, /load, /metrics and /version, which need no API key."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from loraplex import __version__
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.protocol import EngineStats
from loraplex.platform.auth.principal import check_token
from loraplex.platform.engines.deployment import Deployment, current_deployment
from loraplex.platform.errors import Unavailable
from loraplex.platform.http.latest import Latest

SCRAPE_SECONDS = 5

router = APIRouter(tags=["operations"])

Serving = Annotated[Deployment, Depends(current_deployment)]


@router.get("/health")
async def health(deployment: Serving) -> Response:
    """200 while the engine is ready and responsive, else 503."""
    if not deployment.is_serving:
        raise Unavailable("The engine is not ready.")
    return Response()


@router.get("/ping")
@router.post("/ping")
async def ping(deployment: Serving) -> Response:
    """The same as /health, under the name that SageMaker calls."""
    return await health(deployment)


@router.get("/load")
async def load(deployment: Serving) -> dict[str, int]:
    """The number of requests that are being answered."""
    return {"server_load": deployment.metrics.num_active}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request, deployment: Serving) -> Response:
    """Metrics as Prometheus text; needs the metrics token if the operator has set one."""
    token = deployment.settings.metrics_token
    if token is not None:
        check_token(request.headers.get("authorization"), token.get_secret_value())
    latest: Latest = request.app.state.metrics
    return Response(await latest.get(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


def latest_metrics(deployment: Deployment) -> Latest:
    """Returns the content of `/metrics`, rendered in a thread, since many tenants make it long."""

    async def render() -> bytes:
        stats = await _stats(deployment)
        return await asyncio.to_thread(deployment.metrics.render, stats)

    return Latest(render, deployment.settings.metrics_max_age)


async def _stats(deployment: Deployment) -> EngineStats | None:
    if not deployment.is_serving:
        return None
    try:
        return await asyncio.wait_for(deployment.engine.stats(), SCRAPE_SECONDS)
    except (EngineUnavailable, TimeoutError):
        return None

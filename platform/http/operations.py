"""The operator's routes: /health, /metrics, /version. They need no key."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from loraplex import __version__
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.protocol import EngineStats
from loraplex.platform.engines.deployment import Deployment, current_deployment
from loraplex.platform.errors import Unavailable

SCRAPE_SECONDS = 5

router = APIRouter(tags=["operations"])

Serving = Annotated[Deployment, Depends(current_deployment)]


@router.get("/health")
async def health(deployment: Serving) -> Response:
    """200 when requests are let through to an engine that gives signs of life, else 503."""
    if not deployment.is_serving:
        raise Unavailable("The engine is not ready.")
    return Response()


@router.get("/metrics")
async def metrics(deployment: Serving) -> Response:
    """Prometheus text."""
    stats = await _stats(deployment)
    text = await asyncio.to_thread(deployment.metrics.render, stats)  # long with many tenants
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


async def _stats(deployment: Deployment) -> EngineStats | None:
    if not deployment.is_serving:
        return None
    try:
        return await asyncio.wait_for(deployment.engine.stats(), SCRAPE_SECONDS)
    except (EngineUnavailable, TimeoutError):
        return None

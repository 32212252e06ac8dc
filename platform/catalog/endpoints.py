"""The operator's routes that change which adapters are served, under vLLM's names."""

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse
from pydantic import AfterValidator, Field

from loraplex.platform.auth.principal import Principal, operator
from loraplex.platform.engines.deployment import Deployment, current_deployment
from loraplex.platform.inference.bodies.fields import Body, Text, only
from loraplex.platform.inference.bodies.route import JsonRoute
from loraplex.platform.setting_types import ModelName

router = APIRouter(prefix="/v1", tags=["adapters"], route_class=JsonRoute)

Operator = Annotated[Principal, Depends(operator)]
Serving = Annotated[Deployment, Depends(current_deployment)]


def _is_absolute(path: str) -> str:
    if "\0" in path or not Path(path).is_absolute():
        raise ValueError("must be an absolute path of a folder on the server")
    return path


class LoadAdapter(Body):
    lora_name: ModelName
    lora_path: Annotated[
        Text,
        AfterValidator(_is_absolute),
        Field(description="Absolute path of a PEFT folder on the server"),
    ]
    load_inplace: Annotated[Any, only(False)] = None


class UnloadAdapter(Body):
    lora_name: Text
    lora_int_id: Any = None


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadAdapter, principal: Operator, deployment: Serving) -> str:
    """Registers a PEFT folder of the server's machine until it is unloaded or the server ends."""
    await deployment.register_adapter(principal, body.lora_name, Path(body.lora_path))
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadAdapter, principal: Operator, deployment: Serving) -> str:
    """Removes an adapter for new requests; requests that run on it are not interrupted."""
    await deployment.unregister_adapter(principal, body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

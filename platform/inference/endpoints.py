"""The tenant's routes: /v1/models, /v1/base_prompts, /v1/chat/completions, /v1/completions."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from loraplex.platform.auth.principal import Principal, current_principal
from loraplex.platform.catalog.cards import BasePromptCard, BasePromptList, ModelCard, ModelList
from loraplex.platform.catalog.service import Model
from loraplex.platform.engines.deployment import Deployment, current_deployment
from loraplex.platform.inference.answers.chat import ChatRenderer
from loraplex.platform.inference.answers.completions import CompletionRenderer
from loraplex.platform.inference.answers.streaming import Renderer, answer_stream, answer_whole
from loraplex.platform.inference.bodies.route import JsonRoute
from loraplex.platform.inference.bodies.schemas import ChatCompletionRequest, CompletionRequest
from loraplex.platform.inference.generation import Generation, run
from loraplex.platform.inference.load import Load
from loraplex.platform.inference.waiting import unless_gone

router = APIRouter(prefix="/v1", route_class=JsonRoute)

Caller = Annotated[Principal, Depends(current_principal)]
Serving = Annotated[Deployment, Depends(current_deployment)]


@router.get("/models", tags=["models"])
async def list_models(principal: Caller, deployment: Serving) -> ModelList:
    """The base model and the caller's adapters."""
    models = await deployment.catalog.list(principal)
    return ModelList(data=[_card(model, deployment) for model in models])


@router.get("/models/{name:path}", tags=["models"])
async def get_model(name: str, principal: Caller, deployment: Serving) -> ModelCard:
    """The base model or one of the caller's adapters."""
    return _card(await deployment.catalog.resolve(principal, name), deployment)


@router.get("/base_prompts", tags=["base prompts"])
async def list_base_prompts(principal: Caller, deployment: Serving) -> BasePromptList:
    """The prompts that the operator published, with which any caller's prompts may begin."""
    data = [
        BasePromptCard(
            id=prompt.name,
            created=prompt.created,
            version=prompt.ref.version,
            kind="messages" if prompt.source.messages else "text",
            num_tokens=len(prompt.token_ids),
        )
        for prompt in deployment.base_prompts.list()
    ]
    return BasePromptList(data=data)


@router.post("/chat/completions", tags=["inference"])
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, principal: Caller, deployment: Serving
) -> Response:
    """Generates the next message of a conversation, whole or as server-sent events."""
    request.app.state.load.check(principal.tenant)
    generation = await unless_gone(request, deployment.inference.chat(principal, body))
    renderer = ChatRenderer(generation, body.answer_options)
    return await _answer(request, generation, renderer, body, deployment)


@router.post("/completions", tags=["inference"])
async def create_completion(
    body: CompletionRequest, request: Request, principal: Caller, deployment: Serving
) -> Response:
    """Generates the text that follows each prompt, whole or as server-sent events."""
    request.app.state.load.check(principal.tenant)
    generation = await unless_gone(request, deployment.inference.completion(principal, body))
    renderer = CompletionRenderer(generation, body.answer_options)
    return await _answer(request, generation, renderer, body, deployment)


async def _answer(
    request: Request,
    generation: Generation,
    renderer: Renderer,
    body: ChatCompletionRequest | CompletionRequest,
    deployment: Deployment,
) -> Response:
    load: Load = request.app.state.load
    events = run(deployment.failover, generation, load)
    events = deployment.accounting.account(current_principal(request), generation, events)
    events = deployment.metrics.watch(generation, events)
    if body.stream:
        include_usage = body.answer_options.usage_at_end
        return await answer_stream(request, generation, events, renderer, include_usage)
    return await answer_whole(request, generation, events, renderer)


def _card(model: Model, deployment: Deployment) -> ModelCard:
    info = deployment.engine.info
    return ModelCard(
        id=model.name,
        created=model.created,
        root=model.name,
        parent=model.parent,
        activation=model.activation,
        base_prompt=model.base_prompt,
        fault=model.fault,
        max_model_len=None if info is None else info.max_model_len,
        chat_template="base" if model.text.chat_template is None else "adapter",
        notes=list(model.text.notes),
    )

"""How models and base prompts are shown to callers."""

from typing import Literal

from pydantic import BaseModel

from loraplex.adapters.manifest import Activation


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int  # Unix seconds
    owned_by: str = "loraplex"
    root: str
    parent: str | None  # an adapter's base model
    activation: Activation | None
    base_prompt: str | None
    fault: str | None  # why the model cannot be served now
    max_model_len: int | None
    chat_template: Literal["base", "adapter"]  # whose template is used
    notes: list[str]  # how serving deviates from the adapter's folder


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class BasePromptCard(BaseModel):
    id: str
    object: Literal["base_prompt"] = "base_prompt"
    created: int
    version: int
    kind: Literal["messages", "text"]
    num_tokens: int


class BasePromptList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BasePromptCard]

"""BasePrompts: the prompts that the operator published to all tenants, by name."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import PromptRejected, RequestRejected
from loraplex.engine.protocol import BasePromptRef, PublishBasePrompt
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.errors import BasePromptNotFound, SettingsRefused
from loraplex.platform.inference.bodies.schemas import Message

Messages = list[dict[str, Any]]

_MESSAGES = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
_FIRST_VERSION = 1
_ROLES = ("user", "system", "assistant")  # that the next message may have
_BEGINNINGS = ("a", "1", "\n", "#", " ")  # that the next message may have


@dataclass(frozen=True)
class PromptSource:
    """A text, or the messages with which conversations begin."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, path: Path) -> "PromptSource":
        """Reads a list of messages from a .json file, and a text from any other file.

        Raises:
            SettingsRefused: with every fault of the file.
        """
        is_messages = path.suffix == ".json"
        try:
            text = path.read_bytes().decode()
            if not is_messages:
                if not text:
                    raise SettingsRefused([f"{str(path)!r} is empty"])
                return cls(text=text)
            messages = _MESSAGES.validate_python(json.loads(text))
        except OSError as error:
            raise SettingsRefused([f"cannot read {str(path)!r}: {error.strerror}"]) from error
        except ValidationError as error:
            faults = [f"{_place(fault['loc'])}: {fault['msg']}" for fault in error.errors()]
            raise SettingsRefused([f"{str(path)!r} {fault}" for fault in faults]) from error
        except ValueError as error:
            kind = "JSON" if is_messages else "UTF-8 text"
            raise SettingsRefused([f"{str(path)!r} is not valid {kind}: {error}"]) from error
        return cls(messages=tuple(message.for_template() for message in messages))

    def token_ids(self, tokenizer: Tokenizer, now: datetime) -> list[int]:
        """Returns the tokens with which every prompt that uses this source begins.

        For messages these are the tokens that the model's chat template puts first whatever the
        next message is, and whichever role it has.

        Args:
            now: the time that the template is given.

        Raises:
            PromptRejected: if the chat template refuses the messages.
        """
        if not self.messages:
            return tokenizer.encode(self.text)

        def chats(role: str) -> list[str]:
            continuations = [{"role": role, "content": content} for content in _BEGINNINGS]
            return [
                tokenizer.render_chat([*self.messages, message], now=now)
                for message in continuations
            ]

        found: list[str] = []
        for role in _ROLES:
            with suppress(PromptRejected):
                found += chats(role)
        prompts = [
            tokenizer.encode(chat, add_special_tokens=False) for chat in found or chats("user")
        ]
        return list(_common_beginning(prompts))


@dataclass(frozen=True)
class BasePrompt:
    name: str
    created: int  # Unix seconds
    source: PromptSource
    ref: BasePromptRef
    token_ids: list[int]

    @property
    def published_at(self) -> datetime:
        """Time for the chat template, so that a date in the prompt stays the same."""
        return datetime.fromtimestamp(self.created)


class BasePrompts:
    """Published prompts, whose names belong to the operator and may be used by all tenants."""

    def __init__(self) -> None:
        self._prompts: dict[str, BasePrompt] = {}

    def list(self) -> list[BasePrompt]:
        return sorted(self._prompts.values(), key=lambda prompt: prompt.name)

    def has(self, name: str) -> bool:
        return name in self._prompts

    def resolve(self, name: str) -> BasePrompt:
        """Raises BasePromptNotFound."""
        prompt = self._prompts.get(name)
        if prompt is None:
            raise BasePromptNotFound(name)
        return prompt

    async def publish(
        self, engine: EngineClient, tokenizer: Tokenizer, name: str, source: PromptSource
    ) -> BasePrompt:
        """Publishes a prompt, and returns when the engine has computed and pinned it.

        A known name keeps its id, so that a new engine gets the same prompt as its predecessor.

        Raises:
            PromptRejected: if the chat template refuses the messages.
            RequestRejected: with the reason, if the prompt is empty or too long.
            EngineUnavailable: if no engine is there to compute the prompt.
        """
        prompt = self._prompts.get(name) or _first_version(name, source, tokenizer)
        await _publish(engine, prompt)
        self._prompts[name] = prompt
        return prompt

    async def restore(self, engine: EngineClient) -> Sequence[str]:
        """Publishes every prompt to a new engine, and returns the reasons of those it refuses.

        Raises:
            EngineUnavailable: if that engine ends too.
        """
        faults = []
        for prompt in self.list():
            try:
                await _publish(engine, prompt)
            except RequestRejected as rejection:
                faults.append(f"Base prompt {prompt.name}: {rejection.message}")
        return faults


def read_prompts(paths: Mapping[str, Path]) -> dict[str, PromptSource]:
    """Reads the prompts of the settings.

    Raises:
        SettingsRefused: with every fault of every file.
    """
    found, faults = {}, []
    for name, path in paths.items():
        try:
            found[name] = PromptSource.read(path)
        except SettingsRefused as refusal:
            faults += [f"--base-prompt {name}: {fault}" for fault in refusal.faults]
    if faults:
        raise SettingsRefused(faults)
    return found


async def _publish(engine: EngineClient, prompt: BasePrompt) -> None:
    await engine.publish_base_prompt(
        PublishBasePrompt(
            request_id=f"base-prompts-{uuid.uuid4().hex}",
            prompt_id=prompt.ref.prompt_id,
            version=prompt.ref.version,
            token_ids=prompt.token_ids,
        )
    )


def _first_version(name: str, source: PromptSource, tokenizer: Tokenizer) -> BasePrompt:
    created = int(time.time())
    ref = BasePromptRef(prompt_id=f"bpr_{uuid.uuid4().hex}", version=_FIRST_VERSION)
    token_ids = source.token_ids(tokenizer, datetime.fromtimestamp(created))
    return BasePrompt(name, created, source, ref, token_ids)


def _common_beginning(rows: Sequence[Sequence[int]]) -> Iterator[int]:
    for tokens in zip(*rows, strict=False):
        if len(set(tokens)) > 1:
            return
        yield tokens[0]


def _place(where: tuple[int | str, ...]) -> str:
    return ".".join(map(str, where)) or "is wrong"

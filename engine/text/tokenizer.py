"""Tokenizer: text and messages to token ids and back, as transformers would. Torch-free."""

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from loraplex.engine.errors import PromptRejected, UnsupportedModel
from loraplex.engine.text.chat_template import (
    DEFAULT_CHAT_TEMPLATE,
    DEFAULT_STOP,
    RESERVED_NAMES,
    Chat,
)
from loraplex.engine.text.encoding_bounds import EncodingBounds, characters_per_token
from loraplex.engine.text.template_files import DEFAULT, read_json, read_templates
from loraplex.engine.text.template_processes import TemplateProcesses
from loraplex.engine.text.text_offsets import TextOffsets, offsets_in

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """Made by `from_folder`. Its methods may be called from several threads at once."""

    def __init__(
        self, backend: Backend, config: Mapping[str, Any], templates: Mapping[str, str]
    ) -> None:
        """
        Args:
            config: the content of tokenizer_config.json.
            templates: the model's own chat templates by name.
        """
        self._backend = backend
        self._bounds: EncodingBounds | None = None
        self.special_tokens: dict[str, str] = {
            name: content for name in SPECIAL_TOKENS if (content := _content(config.get(name)))
        }
        self._add_missing_tokens(config)
        decoder = self._backend.get_added_tokens_decoder()
        self._special = {token: added.content for token, added in decoder.items() if added.special}
        self._backend.no_truncation()
        self._backend.no_padding()
        self.templates = dict(templates) or {DEFAULT: DEFAULT_CHAT_TEMPLATE}
        self.has_own_chat_template = bool(templates)
        self._variables: dict[str, object] = {**self.special_tokens, "adds_bos": self.adds_bos}
        self._processes = TemplateProcesses()
        for source in templates.values():
            self.check_template(source)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and the Hugging Face files beside it where there are any.

        Raises:
            UnsupportedModel: if the folder holds no readable tokenizer.json.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise UnsupportedModel(f"There is no tokenizer.json in {folder}")
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise UnsupportedModel(f"Cannot read {folder / 'tokenizer.json'}: {error}") from error
        declared = read_json(folder / "tokenizer_config.json")
        config = {**read_json(folder / "special_tokens_map.json"), **declared}
        templates = read_templates(folder, declared)
        try:
            return cls(backend, config, templates)
        except UnsupportedModel:
            raise
        except Exception as error:  # whatever an entry of another form meets
            message = f"Cannot use {folder / 'tokenizer_config.json'}: {error}"
            raise UnsupportedModel(message) from error

    def close(self) -> None:
        """Ends the processes that chat templates run in. More chats can still be rendered."""
        self._processes.close()

    @property
    def vocab_size(self) -> int:
        """Returns how many ids have a text, added tokens included. The model's vocabulary may be
        larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def default_stop(self) -> tuple[str, ...]:
        """Returns a stop string for models that were never taught to end a turn."""
        return () if self.has_own_chat_template else DEFAULT_STOP

    @cached_property
    def _characters_per_token(self) -> int:
        return characters_per_token(self._backend)

    @cached_property
    def adds_bos(self) -> bool:
        bos = self.special_tokens.get("bos_token")
        return bos is not None and self.encode("")[:1] == [self._backend.token_to_id(bos)]

    def within(self, max_tokens: int, is_unwanted: Callable[[], bool]) -> "Tokenizer":
        """Returns the same tokenizer, but `encode` refuses what cannot fit after bounded work, and
        stops where the result is no longer wanted, with concurrent.futures.CancelledError."""
        bounded = copy.copy(self)
        bounded._bounds = EncodingBounds(max_tokens, self._characters_per_token, is_unwanted)
        return bounded

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """
        Raises:
            PromptTooLong: if the text cannot fit within the tokenizer's bounds.
            PromptRejected: for a lone surrogate, which is no character.
        """
        if self._bounds is not None:
            self._bounds.check(text, lambda piece: len(self._encode(piece, False)))
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = "The text holds a lone surrogate, which is no character."
            raise PromptRejected(message) from error
        # The batch form lets other threads run meanwhile; the plain one does not.
        encodings = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encodings[0].ids)

    def encode_end(self, text: str, num_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Returns at most so many last tokens of a text. The work is bounded by their number.

        Raises:
            PromptRejected: for a lone surrogate, which is no character.
        """
        end = text[-(num_tokens + 1) * self._characters_per_token :]
        return self._encode(end, add_special_tokens)[-num_tokens:]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def default_template(self) -> str | None:
        """Returns the model's own chat template that is used where none is named."""
        return self.templates.get(DEFAULT) if self.has_own_chat_template else None

    def check_template(self, template: str) -> None:
        """Raises UnsupportedModel where the text is no template."""
        try:
            self._processes.check(template)
        except PromptRejected as error:
            raise UnsupportedModel(error.message) from error

    def special_in(self, text: str) -> str | None:
        """Returns the first special token in a text, if any."""
        found = (self._special.get(token) for token in self.encode(text, False))
        return next((content for content in found if content is not None), None)

    def text_offsets(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> TextOffsets:
        """Follows the text behind a prompt."""
        return TextOffsets(self._backend, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def offsets_in(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Returns where in their text tokens begin, in characters."""
        return offsets_in(self._backend, token_ids, text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        now: datetime | None = None,
        *,
        continues_last: bool = False,
        template: str | None = None,
    ) -> str:
        """Returns the prompt's text with every special token in it: encode it without adding more.

        Args:
            variables: more names for the template, where it knows any.
            now: what it takes for the time, where it asks; None: the time.
            continues_last: ends the prompt within the last message, for the answer to go on there.
            template: one of the model's by name, or a text of its own; None: the model's default.

        Raises:
            PromptRejected: if the template refuses these messages, is broken, or if there is none.
        """
        variables = variables or {}
        if taken := RESERVED_NAMES & variables.keys():
            raise PromptRejected(f"The template sets {', '.join(sorted(taken))} itself.")
        chat = Chat(
            messages,
            add_generation_prompt,
            {**self._variables, **variables},
            now or datetime.now(),
            continues_last,
        )
        try:
            return self._processes.render(self._template(template), chat)
        except UnsupportedModel as error:
            raise PromptRejected(error.message) from error

    def _template(self, template: str | None) -> str:
        if template is not None:
            return self.templates.get(template, template)
        if DEFAULT in self.templates:
            return self.templates[DEFAULT]
        names = ", ".join(sorted(self.templates))
        raise PromptRejected(
            "The model has several chat templates and none by default; chat_template can name one "
            f"of them: {names}."
        )

    def _add_missing_tokens(self, config: Mapping[str, Any]) -> None:
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        declared = config.get("added_tokens_decoder") or {}
        for _, fields in sorted(declared.items(), key=lambda item: int(item[0])):
            if fields["content"] not in known:
                self._backend.add_tokens([_added_token(fields)])
        for content in self.special_tokens.values():
            if content not in known:
                self._backend.add_special_tokens([content])


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})

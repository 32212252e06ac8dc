"""AdapterText: the chat template and the tokenizer in an adapter's folder."""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.engine.errors import RequestRejected, UnsupportedModel
from loraplex.engine.protocol import FailureCode
from loraplex.engine.text.tokenizer import Tokenizer

MAX_TEMPLATE = 1 << 20  # bytes of a file that may hold a template
MAX_TOKENIZER = 64 << 20  # bytes of a tokenizer.json
NO_TEXT_OF_ITS_OWN = ("truncation", "padding", "version")  # parts of a tokenizer.json
OTHER_TOKENIZER = (
    "The adapter's folder has a tokenizer that differs from the base model's; the base model's "
    "tokenizer is used."
)


@dataclass(frozen=True)
class AdapterText:
    chat_template: str | None = None  # None: the base model's
    notes: tuple[str, ...] = ()  # for callers: how serving deviates from the folder


NO_TEXT = AdapterText()


def read_adapter_text(folder: Path, base_folder: Path, tokenizer: Tokenizer) -> AdapterText:
    """Reads an adapter's chat template, and compares its tokenizer with the served one.

    Args:
        folder: the adapter's folder; its files come from a tenant.
        base_folder: the folder of the served tokenizer.

    Raises:
        RequestRejected: if the template cannot be read or is invalid; names no path.
    """
    try:
        template = _template(folder)
        if template == tokenizer.default_template:
            template = None
        if template is not None:
            tokenizer.check_template(template)
    except UnsupportedModel as error:
        raise _rejected(error.message) from error
    notes = (OTHER_TOKENIZER,) if _has_other_tokenizer(folder, base_folder) else ()
    return AdapterText(template, notes)


def _template(folder: Path) -> str | None:
    content = _read(folder / "chat_template.jinja", MAX_TEMPLATE)
    if content is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise _rejected("chat_template.jinja is not UTF-8") from error
    config = _json(_read(folder / "tokenizer_config.json", MAX_TEMPLATE))
    templates = config.get("chat_template")
    if isinstance(templates, list):
        named = {it.get("name"): it.get("template") for it in templates if isinstance(it, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) and templates else None


def _has_other_tokenizer(folder: Path, base_folder: Path) -> bool:
    own = _read(folder / "tokenizer.json", MAX_TOKENIZER)
    if own is None:
        return False
    base = (base_folder / "tokenizer.json").read_bytes()
    return own != base and _meaning(own) != _meaning(base)


def _meaning(content: bytes) -> dict[str, Any]:
    parts = _json(content).items()
    return {name: part for name, part in parts if name not in NO_TEXT_OF_ITS_OWN}


def _json(content: bytes | None) -> dict[str, Any]:
    """Returns the JSON object in a file's content, or an empty one."""
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: Path, max_bytes: int) -> bytes | None:
    """Returns a regular file's content without following links; None if there is no such file."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return None
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _rejected(f"{path.name} has more than {max_bytes} bytes")
    return content


def _rejected(message: str) -> RequestRejected:
    return RequestRejected(FailureCode.ADAPTER_REJECTED, message, "adapter")

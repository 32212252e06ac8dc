"""TemplateFiles: reads the chat templates of a Hugging Face folder, by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.engine.errors import UnsupportedModel

DEFAULT = "default"  # the name of the one that is used where none is named


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file; empty where there is no file.

    Raises:
        UnsupportedModel: if it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise UnsupportedModel(f"Cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object")
    return content


def read_text(path: Path) -> str:
    """Returns a file's text. Raises UnsupportedModel where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"Cannot read {path}: {error}") from error


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns template texts by name, from the places that transformers knows; later ones win.

    Args:
        config: what tokenizer_config.json holds.

    Raises:
        UnsupportedModel: where one cannot be read, or has another form.
    """
    found = _of_config(config.get("chat_template"), folder / "tokenizer_config.json")
    legacy = read_json(folder / "chat_template.json").get("chat_template")
    found |= _of_config(legacy, folder / "chat_template.json")
    if (folder / "chat_template.jinja").is_file():
        found[DEFAULT] = read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
    return found


def _of_config(templates: object, where: Path) -> dict[str, str]:
    """Returns templates from a text, a list of {"name", "template"}, or an object of templates by
    name."""
    if not templates:
        return {}
    if isinstance(templates, str):
        return {DEFAULT: templates}
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        pairs = [(entry.get("name"), entry.get("template")) for entry in templates]
    elif isinstance(templates, dict):
        pairs = list(templates.items())
    else:
        pairs = [(None, None)]
    found = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if len(found) < len(pairs):
        raise UnsupportedModel(
            f"{where}: chat_template must be a text, or a list of templates that have a name and "
            "a template each"
        )
    return found

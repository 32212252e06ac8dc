"""The types of settings: sizes, names, folders, keys and origins, each with its check."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[kmg]i?)b?", re.IGNORECASE)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/,\s]+")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def parse_size(value: object) -> object:
    """Converts "2GiB", "500MB" or "1024" to bytes, and leaves other types to the next check."""
    if not isinstance(value, str):
        return value
    match = SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"must be bytes or a size such as 500MB or 2GiB, got {value!r}")
    return int(float(match[1]) * UNITS[match[2].lower()])


def check_name(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ValueError(
            "must have 1 to 128 letters, digits or . _ : - and begin with a letter or a digit, "
            f"got {name!r}"
        )
    return name


def check_folder(folder: Path) -> Path:
    if not folder.expanduser().is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    return folder.expanduser().absolute()


def check_checkpoint(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is no Hugging Face checkpoint: it has no config.json")
    return folder


def check_file(path: Path) -> Path:
    if not path.expanduser().is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    return path.expanduser().absolute()


def split_list(value: object) -> object:
    """Splits a text at its commas, and leaves other types to the next check."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def check_origin(origin: str) -> str:
    if origin != "*" and ORIGIN.fullmatch(origin) is None:
        raise ValueError(f"must be * or an origin such as https://example.org, got {origin!r}")
    return origin


def check_key(key: SecretStr) -> SecretStr:
    """Returns a key that a header can carry unchanged; blanks around it would be cut off."""
    if re.fullmatch(r"[!-~]+", key.get_secret_value()) is None:
        raise ValueError("must be printable ASCII characters without blanks or line breaks")
    return key


Folder = Annotated[Path, AfterValidator(check_folder)]
File = Annotated[Path, AfterValidator(check_file)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
Origin = Annotated[str, AfterValidator(check_origin)]
ModelName = Annotated[str, AfterValidator(check_name)]
Checkpoint = Annotated[Folder, AfterValidator(check_checkpoint)]
Key = Annotated[SecretStr, AfterValidator(check_key)]
Origins = Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(split_list)]

"""parse: the bytes of a body become a checked request, or its first faults and their number.

Work and answer are bounded by what a valid request needs, whatever the bytes hold.
"""

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from loraplex.platform.errors import MAX_FAULTS, Fault, InvalidRequest
from loraplex.platform.http.faults import fault_of
from loraplex.platform.inference.bodies.schemas import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    CompletionRequest,
    Message,
)

MAX_VALUES = 10_000  # of one parameter other than the prompt
MAX_KEYS = 50  # of a message
MAX_LISTED = 1000  # faults of pydantic that are formatted, to show the first few

Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest)
NOTHING_SAID = Message.model_construct(role="user", content="")  # replaces a faulty message


class Faults:
    """The first few faults, and the number of all."""

    def __init__(self) -> None:
        self.first: list[Fault] = []
        self.count = 0

    def add(self, fault: Fault) -> None:
        self.count += 1
        if len(self.first) < MAX_FAULTS:
            self.first.append(fault)

    def add_all(self, error: ValidationError, where: tuple[str | int, ...] = ()) -> None:
        if error.error_count() > MAX_LISTED:
            self.add(Fault(None, f"The body has {error.error_count()} faults, too many to list."))
            return
        self.count += error.error_count()
        room = MAX_FAULTS - len(self.first)
        if room > 0:
            details = error.errors(include_url=False, include_input=False)[:room]
            self.first += [fault_of({**it, "loc": where + it["loc"]}) for it in details]


def parse(kind: type[Body], content: bytes) -> Body:
    """Returns the request.

    Raises:
        InvalidRequest: with the first faults and the number of all.
    """
    given = _load(content)
    faults = Faults()
    for name in _ignored(kind) & given.keys():
        given[name] = None
    _check_names(kind, given, faults)
    _check_sizes(given, faults)
    messages = Faults()
    if kind is ChatCompletionRequest and isinstance(given.get("messages"), list):
        given["messages"] = _messages(given["messages"], messages)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        faults.add_all(error)
    faults.first = (faults.first + messages.first)[:MAX_FAULTS]
    faults.count += messages.count
    if faults.count:
        raise InvalidRequest.of(faults.first, faults.count)
    return body


def _load(content: bytes) -> dict[str, Any]:
    try:
        given = json.loads(content)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid JSON: it is not UTF-8") from None
    except ValueError:
        raise InvalidRequest("The body is not valid JSON: a number has too many digits") from None
    except RecursionError:
        raise InvalidRequest("The body is not valid JSON: it is nested too deeply") from None
    if not isinstance(given, dict):
        raise InvalidRequest(
            "The body must be a JSON object, sent with content-type application/json"
        )
    return given


def _ignored(kind: type[BaseModel]) -> set[str]:
    """Returns the parameters that are accepted and ignored."""
    fields = kind.model_fields.items()
    return {name for name, field in fields if field.annotation is Any and not field.metadata}


def _check_names(kind: type[BaseModel], given: dict[str, Any], faults: Faults) -> None:
    """Removes unknown names if they are too many for pydantic."""
    unknown = [name for name in given if name not in kind.model_fields]
    if len(unknown) <= MAX_FAULTS:
        return
    for name in unknown:
        del given[name]
        faults.add(Fault(name, f"Unknown parameter: {name}"))


def _check_sizes(given: dict[str, Any], faults: Faults) -> None:
    """Removes parameters that hold more values than any valid one does."""
    for name in given.keys() - {"messages", "prompt"}:
        if _holds_more(given[name], MAX_VALUES):
            given[name] = None
            faults.add(Fault(name, f"{name}: holds more than {MAX_VALUES} values"))


def _holds_more(value: object, limit: int) -> bool:
    waiting: list[Iterator[object]] = [iter([value])]
    while waiting:
        inner = next(waiting[-1], waiting)
        if inner is waiting:
            waiting.pop()
            continue
        limit -= 1
        if limit < 0:
            return True
        if isinstance(inner, list):
            waiting.append(iter(inner))
        elif isinstance(inner, dict):
            waiting.append(iter(inner.values()))
    return False


def _messages(given: list[object], faults: Faults) -> list[Message]:
    if len(given) > MAX_MESSAGES:
        text = f"messages: takes at most {MAX_MESSAGES} messages, got {len(given)}"
        faults.add(Fault("messages", text))
        return [NOTHING_SAID]
    return [_message(number, item, faults) for number, item in enumerate(given)]


def _message(number: int, item: object, faults: Faults) -> Message:
    if isinstance(item, dict) and len(item) > MAX_KEYS:
        where = f"messages.{number}"
        faults.add(Fault(where, f"{where}: has {len(item)} keys, more than any message has"))
        return NOTHING_SAID
    try:
        return Message.model_validate(item)
    except ValidationError as error:
        faults.add_all(error, ("messages", number))
        return NOTHING_SAID

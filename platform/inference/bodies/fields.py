"""Types for the fields of bodies: nulls, ranges, texts, and harmless parameters."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

MAX_QUOTED = 40  # characters of a value in a message


class Body(BaseModel):
    """A JSON object in which a null is the same as an absent name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if isinstance(value, dict) and None in value.values():
            return {name: item for name, item in value.items() if item is not None}
        return value


@dataclass(frozen=True)
class Within:
    """A number's range, in the check, its message and the schema."""

    low: float
    high: float
    above: bool = False  # whether `low` itself is out of range

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler(schema)
        for branch in found.get("anyOf", [found]):
            if branch.get("type") in ("integer", "number"):
                branch["exclusiveMinimum" if self.above else "minimum"] = self.low
                branch["maximum"] = self.high
        return found

    def _check(self, value: float | None) -> float | None:
        if value is None or self.low < value <= self.high:
            return value
        if value == self.low and not self.above:
            return value
        start = f"above {self.low} and at most" if self.above else f"between {self.low} and"
        raise ValueError(f"must be {start} {self.high}, got {str(value)[:MAX_QUOTED]}")


def only(*harmless: object) -> AfterValidator:
    """Returns the check of an unsupported parameter, which accepts only values without effect."""

    def check(value: object) -> object:
        if any(value == allowed and type(value) is type(allowed) for allowed in (None, *harmless)):
            return value
        raise ValueError("is not supported by this server; leave it out")

    return AfterValidator(check)


def check_text(text: str) -> str:
    """Returns the text, without lone surrogates, which JSON can spell but no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold a lone surrogate, which is no character") from None
    return text


Ignored = Any  # the type of parameters that do not affect the tokens
Text = Annotated[str, AfterValidator(check_text)]

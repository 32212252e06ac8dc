"""fault_of: pydantic's errors in the words of the API."""

from pydantic_core import ErrorDetails

from loraplex.platform.errors import Fault


def fault_of(detail: ErrorDetails) -> Fault:
    """Returns one of pydantic's errors as a fault: the parameter, and what is allowed."""
    where = [part for part in detail["loc"] if part != "body"]
    kind, message = detail["type"], detail["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return Fault(None, f"The body is not valid JSON: {detail['ctx']['error']}")
    if not where:
        return Fault(
            None, "The body must be a JSON object, sent with content-type application/json"
        )
    param = ".".join(str(part) for part in where)
    if kind == "extra_forbidden":
        return Fault(param, f"Unknown parameter: {param}")
    if kind == "missing":
        return Fault(param, f"Missing required parameter: {param}")
    joint = " " if kind == "value_error" else ": "  # our messages continue after the name
    return Fault(param, f"{param}{joint}{message}")

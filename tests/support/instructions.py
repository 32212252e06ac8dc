"""How much work Python does in a call, without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_instructions(call: Callable[[], object]) -> int:
    """The bytecode instructions that a call executes, in all that it calls in turn."""
    return _count(call, "opcode")


def count_lines(call: Callable[[], object]) -> int:
    """The lines of Python that a call runs, in all that it calls in turn."""
    return _count(call, "line")


def _count(call: Callable[[], object], counted: str) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = counted == "line", counted == "opcode"
        count += event == counted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count

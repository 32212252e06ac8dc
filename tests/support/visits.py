"""How many sequences a call looks at, without a clock."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from loraplex.engine.sequence import Sequence


def count_visits(call: Callable[[], object]) -> int:
    """The different sequences of which the call reads anything."""
    seen: set[int] = set()

    def look(sequence: Sequence, name: str) -> Any:
        seen.add(id(sequence))
        return object.__getattribute__(sequence, name)

    with patch.object(Sequence, "__getattribute__", look):
        call()
    return len(seen)

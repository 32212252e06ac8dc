"""What can go wrong with an adapter. Torch-free.

AdapterError
├── AdapterRejected      the files are wrong, or ask for what is not supported; lists every fault
├── AdapterNotFound      no such adapter is registered
├── AdapterInUse         it cannot be unregistered while a sequence holds it
└── AdapterUnavailable   it is registered, but its stored copy cannot be loaded now
"""

from collections.abc import Iterable, Sequence

MAX_FAULTS = 50

_LISTED = 8
_SHOWN = 200


class AdapterError(Exception):
    """Base of every error of this layer. The text is safe to show to the adapter's owner."""


class AdapterRejected(AdapterError):
    """The adapter cannot be served as its files describe it.

    Args:
        faults: every fault found, each a sentence of its own. The first fifty are kept, the rest
            counted.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        if len(faults) > MAX_FAULTS + 1:  # else they are few, or have been counted before
            more = f"and {len(faults) - MAX_FAULTS:,} more faults"
            self.faults = [*faults[:MAX_FAULTS], more]
        super().__init__("; ".join(self.faults))


class AdapterNotFound(AdapterError):
    pass


class AdapterInUse(AdapterError):
    pass


class AdapterUnavailable(AdapterError):
    pass


def shown(value: object) -> str:
    """Returns a value from an untrusted file, quoted and cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def listed(values: Iterable[object]) -> str:
    """Returns the first few of many values, and how many more there are."""
    items = list(values)
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(shown(item) for item in items[:_LISTED]) + more

"""Example: what a user asks and what the adapter should answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    question: str
    answer: str

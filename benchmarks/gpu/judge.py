"""Whether a result is right: close to what is expected, as a whole and by row, and repeatable."""

from dataclasses import dataclass

import torch
from gpu.case import Case
from torch import Tensor

ROW_FACTOR = 8  # no row may be further off than so many floors: one broken row cannot hide


@dataclass(frozen=True)
class Verdict:
    ok: bool
    error: float  # relative L2
    row_error: float  # the largest of a row's, over the root mean square of all rows
    repeatable: bool  # a second run gave the same bits
    same_specials: bool  # NaN and infinities stand where they are expected


def judge(case: Case) -> Verdict:
    """Runs a case twice with every fresh tensor full of NaN, and compares."""
    with _poison():
        first, second = case.run(), case.run()
    expected = case.expected().to(first.device)
    repeatable = torch.equal(_bits(first), _bits(second))
    finite = torch.isfinite(expected)
    same_specials = torch.equal(first.isnan(), expected.isnan()) and torch.equal(
        first.isinf(), expected.isinf()
    )
    error, row_error = _errors(first, expected, finite)
    close = error <= case.floor and row_error <= ROW_FACTOR * case.floor
    return Verdict(
        close and repeatable and same_specials, error, row_error, repeatable, same_specials
    )


def _errors(got: Tensor, expected: Tensor, finite: Tensor) -> tuple[float, float]:
    if expected.numel() == 0:
        return 0.0, 0.0
    rows = expected.shape[0]
    wanted = torch.where(finite, expected, 0.0).double().reshape(rows, -1)
    off = torch.where(finite, got.double(), 0.0).reshape(rows, -1) - wanted
    size = float(wanted.norm()) or 1.0
    typical = size / rows**0.5
    return float(off.norm()) / size, float(off.norm(dim=1).max()) / typical


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class _poison:
    """Fresh floating-point tensors are full of NaN, integer ones of their largest number."""

    def __enter__(self) -> None:
        self._before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")

    def __exit__(self, *_: object) -> None:
        torch.set_deterministic_debug_mode(self._before)

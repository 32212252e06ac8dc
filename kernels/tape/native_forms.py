"""Native forms: native code for an operation of torch, equal to the bit where that is checked."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from loraplex.kernels.tape import elementwise
from loraplex.kernels.tape.elementwise import NoNativeForm

aten = torch.ops.aten


def _arithmetic(operation: str, out: Tensor, a: Any, b: Any, alpha: float = 1, **mode: Any) -> None:
    if alpha != 1 or mode:
        raise NoNativeForm
    a = _operand(a, out.dtype)
    # Torch rounds a lone number to the result's dtype, except one that it multiplies or divides by.
    b = _operand(b, torch.float32 if operation in "*/" else out.dtype)
    elementwise.arithmetic(operation, a, b, out)


def _operand(value: Any, dtype: torch.dtype) -> Tensor:
    """Returns the operand as the kernel takes it; torch rounds a lone number to that dtype
    first."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype)
    if value.dim() == 0 and value.dtype.itemsize > dtype.itemsize:
        raise NoNativeForm
    return value


def _negate(out: Tensor, a: Tensor) -> None:
    elementwise.arithmetic("*", a, torch.tensor(-1.0), out)


def _convert(out: Tensor, source: Tensor, **_: Any) -> None:
    elementwise.convert(source, out)


def _overwrite(out: Tensor, _: Tensor, source: Tensor, *__: Any) -> None:
    elementwise.convert(source, out)


def _concatenate(out: Tensor, parts: list[Tensor], dim: int = 0) -> None:
    start = 0
    for part in parts:
        size = part.shape[dim]
        elementwise.convert(part, out.narrow(dim, start, size))
        start += size


def _embed(out: Tensor, table: Tensor, ids: Tensor, *_: Any) -> None:
    elementwise.gather_rows(table, ids, out)


def _index(out: Tensor, source: Tensor, indices: list[Tensor | None]) -> None:
    """Returns one tensor of rows, preceded only by dimensions of size 1."""
    *before, ids = indices
    if ids is None or any(i is not None for i in before) or len(before) + 2 != source.dim():
        raise NoNativeForm
    if any(size != 1 for size in source.shape[: len(before)]):
        raise NoNativeForm
    table = source.view(source.shape[-2:])
    elementwise.gather_rows(table, ids, out)


def _fill(value: float, out: Tensor, *_: Any, **__: Any) -> None:
    elementwise.convert(torch.tensor(value, dtype=out.dtype), out)


def _fill_with(out: Tensor, _: Any, value: float, **__: Any) -> None:
    elementwise.convert(torch.tensor(value, dtype=out.dtype), out)


# By operation: what writes its result into a tensor, given its own arguments.
NATIVE_FORMS: dict[OpOverload, Callable[..., None]] = {
    aten.add.Tensor: partial(_arithmetic, "+"),
    aten.add_.Tensor: partial(_arithmetic, "+"),
    aten.sub.Tensor: partial(_arithmetic, "-"),
    aten.sub_.Tensor: partial(_arithmetic, "-"),
    aten.mul.Tensor: partial(_arithmetic, "*"),
    aten.mul_.Tensor: partial(_arithmetic, "*"),
    aten.div.Tensor: partial(_arithmetic, "/"),
    aten.div_.Tensor: partial(_arithmetic, "/"),
    aten.neg.default: _negate,
    aten._to_copy.default: _convert,
    aten.clone.default: _convert,
    aten.copy_.default: _overwrite,
    aten.cat.default: _concatenate,
    aten.embedding.default: _embed,
    aten.index.Tensor: _index,
    aten.zeros.default: partial(_fill, 0),
    aten.zeros_like.default: partial(_fill, 0),
    aten.new_zeros.default: partial(_fill, 0),
    aten.ones.default: partial(_fill, 1),
    aten.ones_like.default: partial(_fill, 1),
    aten.full.default: _fill_with,
    aten.fill_.Scalar: _fill_with,
}

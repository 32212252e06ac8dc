"""Torch's own simple operations in native code, equal to the bit, so that a tape can hold them."""

from array import array

import torch
from torch import Tensor

from loraplex.kernels.native.library import launch, num_threads

_GRAIN = 32 * 1024  # numbers worth a thread
_MAX_DIMS = 6
_LETTERS = {torch.float32: "f", torch.bfloat16: "b", torch.int64: "l"}
_ARITHMETIC = ("fff", "fbf", "bff", "bfb", "bbb")  # number formats of both operands and the result
_CONVERSIONS = ("fb", "bf", "lf")
_SIZES = (1, 2, 4, 8)  # bytes of the numbers that are copied as they are


class NoNativeForm(Exception):
    """Raised for operands that the native code does not know; nothing was written."""


def arithmetic(operation: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a + b, a - b, a * b or a / b, in float32, rounded once.

    Args:
        operation: one of + - * /.
        a, b: float32 or bfloat16, of shapes that broadcast to that of `out`; any strides.
        out: float32 or bfloat16; any strides.

    Raises:
        NoNativeForm: the formats or the number of dimensions are others.
    """
    formats = _formats(_ARITHMETIC, a, b, out)
    a, b = a.expand(out.shape), b.expand(out.shape)
    threads = num_threads(out.numel(), _GRAIN)
    launch(f"lpx_arithmetic_{formats}", a, b, out, _walk(a, b, out), ord(operation), threads)


def convert(source: Tensor, out: Tensor) -> None:
    """out = source in the format of `out`; shapes broadcast, strides are any.

    Raises:
        NoNativeForm: the formats or the number of dimensions are others than the code knows.
    """
    size = out.element_size()
    source = source.expand(out.shape)
    threads = num_threads(out.numel(), _GRAIN)
    if source.dtype != out.dtype:
        formats = _formats(_CONVERSIONS, source, out)
        launch(f"lpx_convert_{formats}", source, out, _walk(source, source, out), threads)
    elif size in _SIZES:
        launch("lpx_copy_strided", source, out, _walk(source, out), size, threads)
    else:
        raise NoNativeForm


def gather_rows(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """out [..., D] = table [N, D] at ids [...] int64, each from -N, the first, to N - 1.

    Raises:
        NoNativeForm: rows are not contiguous, or ids of another format.
    """
    size = table.element_size()
    plain = (
        table.dim() == 2 and table.stride(1) == 1 and ids.is_contiguous() and out.is_contiguous()
    )
    if not plain or ids.dtype != torch.int64:
        raise NoNativeForm
    num_rows, row = table.shape
    threads = num_threads(out.numel(), _GRAIN)
    stride = table.stride(0) * size
    launch("lpx_gather_rows", table, num_rows, ids, out, ids.numel(), stride, row * size, threads)


def _formats(known: tuple[str, ...], *operands: Tensor) -> str:
    formats = "".join(_LETTERS.get(operand.dtype, "?") for operand in operands)
    if formats not in known:
        raise NoNativeForm
    return formats


def _walk(*operands: Tensor) -> "array[int]":
    """Returns the number of dimensions, the sizes and the strides of each operand; neighbours are
    joined where possible, and the last dimension is the densest one of the last operand."""
    *_, out = operands
    order = sorted((d for d in range(out.dim()) if out.shape[d] != 1), key=out.stride, reverse=True)
    dims: list[tuple[int, list[int]]] = []
    for d in order:
        size, strides = out.shape[d], [operand.stride(d) for operand in operands]
        if dims and dims[-1][1] == [size * stride for stride in strides]:
            size *= dims.pop()[0]
        dims.append((size, strides))
    dims = dims or [(1, [1] * len(operands))]
    if len(dims) > _MAX_DIMS:
        raise NoNativeForm
    sizes = [size for size, _ in dims]
    strides = [strides[o] for o in range(len(operands)) for _, strides in dims]
    return array("q", (len(dims), *sizes, *strides))

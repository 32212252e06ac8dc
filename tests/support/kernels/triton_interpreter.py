"""Triton's interpreter, made to compute what a GPU computes.

Loaded by `conftest.py` before anything decorates a kernel: from then on every kernel here is
interpreted, on CPU tensors. Where there is a GPU, kernels are compiled and the tests run on it.
What Triton 3.6 lacks is put in from here: bfloat16 arithmetic by value (it works on the raw bits),
loops as long as an argument says (numpy 2.4 refuses its conversion), and the silence in which a GPU
divides by zero. The names of Triton's that are replaced are private to 3.6.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")  # where tensors for a kernel must lie
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.language import core  # noqa: E402, F401  (found by `_patch_lang` as a global)
from triton.runtime import interpreter  # noqa: E402

Array = NDArray[Any]
_Handle = interpreter.TensorHandle
_Builder = interpreter.InterpreterBuilder
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def bfloat16_values(bits: Array) -> Array:
    """uint16 bits -> float32."""
    return (np.asarray(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16_bits(values: Array) -> Array:
    """Numbers -> uint16 bits, rounded to nearest, ties to even."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _values(handle: Any) -> Array:
    return bfloat16_values(handle.data) if _is_bfloat16(handle) else handle.data


def _is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _handle(values: Array, dtype: Any) -> Any:
    """A result of bfloat16 operands; what comparisons give stays as it is."""
    stays = values.dtype == np.bool_ or dtype.scalar != tl.bfloat16
    return _Handle(values if stays else bfloat16_bits(values), dtype.scalar)


def _by_value(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An elementwise builder method (builder, operand..., numpy function) that knows bfloat16."""

    def method(builder: Any, *arguments: Any) -> Any:
        *operands, function = arguments
        if function in _BITWISE or not any(map(_is_bfloat16, operands)):
            return operation(builder, *arguments)
        return _handle(function(*map(_values, operands)), operands[-1].dtype)

    return method


def _cast(builder: Any, source: Any, target: Any) -> Any:
    if tl.bfloat16 not in (source.dtype.scalar, target.scalar):
        return _original_cast(builder, source, target)
    values = _values(source)
    if target.scalar == tl.bfloat16:
        return _Handle(bfloat16_bits(values), tl.bfloat16)
    return _Handle(values.astype(interpreter._get_np_dtype(target)), target.scalar)


def _float_cast(builder: Any, source: Any, target: Any, rounding: Any) -> Any:
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return _cast(builder, source, target)
    return _original_float_cast(builder, source, target, rounding)


def _fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _handle(_values(x) * _values(y) + _values(z), z.dtype)


def _dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    if not (_is_bfloat16(a) or _is_bfloat16(b)):
        return _original_dot(builder, a, b, d, precision, imprecise)
    return _Handle(np.matmul(_values(a), _values(b)) + d.data, d.dtype.scalar)


def _reduce(operation: Any, operands: tuple[Any, ...]) -> Any:
    if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
        raise TypeError("reduce in float32: a GPU rounds after each step, in an order of its own")
    return _original_reduce(operation, operands)


def _launch(executor: Any, *arguments: Any, **options: Any) -> None:
    with np.errstate(all="ignore"):
        _original_launch(executor, *arguments, **options)


class _Patched:
    """The language stays the interpreter's: to patch and restore it takes half of a launch."""

    def restore(self) -> None:
        pass


def _scalar(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _original_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", _scalar)


_original_cast, _original_float_cast = _Builder.cast_impl, _Builder.create_fp_to_fp
_original_dot = _Builder.create_dot
_original_reduce = interpreter.ReduceOps.apply_impl
_original_launch = interpreter.GridExecutor.__call__
_original_patch_tensor = interpreter._patch_lang_tensor

if INTERPRETED:
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(_Builder, name, _by_value(getattr(_Builder, name)))
    _Builder.cast_impl, _Builder.create_fp_to_fp = _cast, _float_cast
    _Builder.create_fma, _Builder.create_dot = _fma, _dot
    interpreter.ReduceOps.apply_impl = _reduce
    interpreter.GridExecutor.__call__ = _launch
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options  # checks that take as long as the kernel
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._patch_lang(_scalar)
    interpreter._patch_lang = lambda _function: _Patched()

"""Rotates queries and keys with our kernel, in attention modules whose rotation it reproduces."""

from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from loraplex.engine.model.modules import reproduces
from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.kernel_set import Kernels

Rotation = Callable[..., tuple[Tensor, Tensor]]

_NAME = "apply_rotary_pos_emb"  # under which transformers' modules call it
_HEADS, _ROWS, _DIM = 4, 3, 16  # of the sample by which rotations are compared


def replace_rotary(modules: Iterable[nn.Module], dtype: torch.dtype, kernels: Kernels) -> None:
    """Makes attention modules use our rotation where it equals their own.

    Their rotation is a global name in the code of transformers' module. Each such module gets a
    `forward` of its own that sees another function under this name; nothing else changes.
    """
    for module in modules:
        forward = _rebind(type(module).forward, dtype, kernels)
        if forward is not None:
            module.forward = MethodType(forward, module)


def _rebind(forward: Any, dtype: torch.dtype, kernels: Kernels) -> FunctionType | None:
    """Returns the same function with our rotation in it, under the same decorators; None: it has
    none."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:
        rebound = _rebind(inner, dtype, kernels)
        return None if rebound is None else _wrap_again(forward, inner, rebound)
    theirs = forward.__globals__.get(_NAME)
    if theirs is None or _NAME not in forward.__code__.co_names or not _agrees(theirs, dtype):
        return None
    names = {**forward.__globals__, _NAME: _choose(theirs, dtype, kernels)}
    return _copy(forward, names, forward.__closure__)


def _wrap_again(wrapper: Any, inner: Any, rebound: FunctionType) -> FunctionType | None:
    """Returns a decorator's function around another one; None where its closure is not as
    expected."""
    cells = wrapper.__closure__ or ()
    closure = tuple(CellType(rebound) if c.cell_contents is inner else c for c in cells)
    return None if closure == cells else _copy(wrapper, wrapper.__globals__, closure)


def _copy(function: Any, names: dict[str, Any], closure: Any) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _choose(theirs: Rotation, dtype: torch.dtype, kernels: Kernels) -> Rotation:
    def rotation(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        known = not more and not options and query.dim() == 4 and cos.dim() == 3
        if known and query.dtype == cos.dtype == dtype and query.shape[0] == cos.shape[0] == 1:
            return kernels.rotate(query, key, cos, sin)
        return theirs(query, key, cos, sin, *more, **options)

    return rotation


def _agrees(theirs: Rotation, dtype: torch.dtype) -> bool:
    """Returns whether both agree to the bit on random heads, rotated in full, and in half unless
    that is refused."""
    generator = torch.Generator().manual_seed(0)

    def sample(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for width in (_DIM, _DIM // 2):
        query, key = sample(1, _HEADS, _ROWS, _DIM), sample(1, 1, _ROWS, _DIM)
        cos, sin = (sample(1, _ROWS, width // 2).repeat(1, 1, 2) for _ in range(2))
        if reproduces(NAIVE.rotate, theirs, query, key, cos, sin):
            continue
        if width == _DIM or _can(theirs, query, key, cos, sin):
            return False  # else such a model never rotates a part only
    return True


def _can(theirs: Rotation, *inputs: Tensor) -> bool:
    try:
        theirs(*inputs)
    except Exception:
        return False
    return True

"""record: a computation of torch and native operations onto a tape."""

import gc
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from loraplex.kernels.native import elementwise
from loraplex.kernels.native.arena import Arena
from loraplex.kernels.native.elementwise import NoNativeForm
from loraplex.kernels.native.library import Argument, listening
from loraplex.kernels.native.tape import Call, NativeSegment, Tape, TorchCall

aten = torch.ops.aten

_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_VIEWS = {aten._unsafe_view.default}  # whose schemas do not say that they are
_READS = {aten.resolve_conj.default}  # what `tolist` and `numpy` begin with
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_STEERING = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class RecordingRefused(Exception):
    """The computation cannot be played again from a tape; the message says why."""


def record(compute: Callable[[], Tensor], arena: Arena) -> Tape:
    """Runs a computation once and notes down what it does.

    It must do the same, on the same memory, whatever is in its inputs. What it allocates comes from
    `arena`. The tape has been played once and gave the same output.

    Raises:
        RecordingRefused: the host reads values on the way, or something else is not the same again.
    """
    recorder = _Recorder(arena)
    lent = arena.num_lent
    with listening(recorder.note_launch), recorder:
        output = compute()
    if not arena.owns(output):
        raise RecordingRefused("the output does not come from a recorded operation")
    tape = recorder.tape(arena.alias(output))
    expected = output.clone()
    del output, recorder
    if arena.num_lent > lent:
        gc.collect()
    if arena.num_lent > lent:
        raise RecordingRefused("the model keeps a result for later")
    if not _same(tape.play(), expected):
        raise RecordingRefused("played again, it gives another result")
    return tape


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch and every launch of ours, between entering and leaving."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._steps: list[NativeSegment | TorchCall] = []
        self._calls: list[Call] = []  # since the last operation that is left to torch
        self._keeps: list[object] = [arena]

    def tape(self, output: Tensor) -> Tape:
        self._end_segment()
        return Tape(self._steps, output, self._keeps)

    def note_launch(self, name: str, arguments: tuple[Argument, ...]) -> None:
        self._calls.append(Call.of(name, arguments))
        for argument in arguments:
            outside = isinstance(argument, Tensor) and not self._arena.owns(argument)
            if outside or isinstance(argument, array):
                self._keeps.append(argument)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise RecordingRefused(f"{func} reads values on the host")
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if _steers_the_host(func, args):
            raise RecordingRefused(f"what {func} gives depends on values")
        if func in _VIEWS or (_returns_alias(func) and not func._schema.is_mutable):
            return func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._arena.empty_like(func(*args, **kwargs))
        return self._compute(func, args, kwargs)

    def _compute(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """In native code where that gives torch's own result to the bit, else by torch."""
        form = _NATIVE_FORMS.get(func)
        if form is None:
            return self._leave_to_torch(func, args, kwargs)
        num_calls = len(self._calls)
        before = args[0].clone() if func._schema.is_mutable else None
        expected = func(*(args if before is None else (before.clone(), *args[1:])), **kwargs)
        out = self._arena.empty_like(expected) if before is None else args[0]
        try:
            form(out, *args, **kwargs)
        except NoNativeForm:
            pass  # of a cat, some parts may be there already
        else:
            if _same(out, expected):
                return out
        del self._calls[num_calls:]
        if before is not None:
            out.copy_(before)
        return self._leave_to_torch(func, args, kwargs)

    def _leave_to_torch(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        fresh = func(*args, **kwargs)
        results = None if func._schema.is_mutable else tree_map(self._lend, fresh)
        self._end_segment()
        aliases = tree_map(self._alias, (args, kwargs, results))
        self._steps.append(TorchCall(func, *aliases))
        return fresh if results is None else results

    def _lend(self, fresh: Any) -> Any:
        return self._arena.empty_like(fresh).copy_(fresh) if isinstance(fresh, Tensor) else fresh

    def _alias(self, value: Any) -> Any:
        inside = isinstance(value, Tensor) and self._arena.owns(value)
        return self._arena.alias(value) if inside else value

    def _end_segment(self) -> None:
        if self._calls:
            self._steps.append(NativeSegment((Call * len(self._calls))(*self._calls)))
            self._calls = []


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether all numbers are equal; one that is none equals another that is none."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124


def _steers_the_host(func: OpOverload, args: Any) -> bool:
    """Whether a number, or the size of a result, depends on values, or chance does."""
    if func in _INDEXING:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not _STEERING.isdisjoint(func.tags)


def _returns_alias(func: OpOverload) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _arithmetic(operation: str, out: Tensor, a: Any, b: Any, alpha: float = 1, **mode: Any) -> None:
    if alpha != 1 or mode:
        raise NoNativeForm
    a = _operand(a, out.dtype)
    # Torch rounds a lone number to the result's dtype, except one that it multiplies or divides by.
    b = _operand(b, torch.float32 if operation in "*/" else out.dtype)
    elementwise.arithmetic(operation, a, b, out)


def _operand(value: Any, dtype: torch.dtype) -> Tensor:
    """The operand as the kernel takes it; a lone number in that dtype, or a narrower one."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype)
    if value.dim() > 0 or value.dtype.itemsize <= dtype.itemsize:
        return value
    rounded = torch.empty((), dtype=dtype)
    elementwise.convert(value, rounded)
    return rounded


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


def _fill(value: float, out: Tensor, *_: Any, **__: Any) -> None:
    elementwise.convert(torch.tensor(value, dtype=out.dtype), out)


def _fill_with(out: Tensor, _: Any, value: float, **__: Any) -> None:
    elementwise.convert(torch.tensor(value, dtype=out.dtype), out)


# By operation: what writes its result into a tensor, given its own arguments.
_NATIVE_FORMS: dict[OpOverload, Callable[..., None]] = {
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
    aten.zeros.default: partial(_fill, 0),
    aten.zeros_like.default: partial(_fill, 0),
    aten.new_zeros.default: partial(_fill, 0),
    aten.ones.default: partial(_fill, 1),
    aten.ones_like.default: partial(_fill, 1),
    aten.full.default: _fill_with,
    aten.fill_.Scalar: _fill_with,
}

"""record: records a computation of torch and native operations as a tape."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from loraplex.kernels.native.library import listening
from loraplex.kernels.tape.affine import Affine, Sizes, with_steps
from loraplex.kernels.tape.elementwise import NoNativeForm
from loraplex.kernels.tape.native_forms import NATIVE_FORMS
from loraplex.kernels.tape.recording import Recording, Trace
from loraplex.kernels.tape.tape import Tape
from loraplex.kernels.tape.tracked_allocator import TrackedAllocator

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


Arrange: TypeAlias = Callable[[Sizes], Callable[[], Tensor]]


class RecordingRefused(Exception):
    """Raised where the computation cannot be played again from a tape; the message says why."""


def record(arrange: Arrange, base: Sizes, others: Sequence[Sizes], limits: Sizes) -> Tape:
    """Records what a computation does, from a few runs, so that it can be played at any sizes.

    It must do the same, on the same memory, whatever is in its inputs; sizes may only change the
    shapes of tensors, and these as affine functions of the sizes.

    Args:
        arrange: sets inputs of the sizes that it is given, and returns what computes on them.
        base: sizes from which the others are told; each at least 2, so that it is seen where it
            matters, and best such that they stand out among the computation's own.
        others: sizes at which a tape has been played, besides `base`, and has given the bits that
            the computation gives. At the first of them it is recorded once more, to see that all
            numbers are as they follow from the rest.
        limits: the largest sizes that the tape will be played at.

    Raises:
        RecordingRefused: the host reads values on the way, or something else is not the same again.
    """
    allocator = TrackedAllocator()
    samples = [*with_steps(base), *others[:1]]
    runs = {sizes: _record_once(arrange(sizes), allocator) for sizes in samples}
    first = runs[base].recording
    if any(run.recording != first for run in runs.values()):
        raise RecordingRefused("it takes other steps at other sizes")
    known = [run.recording.numbers for run in runs.values()]
    numbers = Affine.through(base, known[: len(base) + 1])
    if any(numbers.at(sizes).tolist() != run.recording.numbers for sizes, run in runs.items()):
        raise RecordingRefused("its shapes do not follow from its sizes by sums")
    tape = Tape(first, numbers, limits)
    for sizes in (base, *others):
        compute = arrange(sizes)
        output = runs[sizes].output if sizes in runs else compute()
        if not _same(tape.play(sizes), output):
            raise RecordingRefused("played again, it gives another result")
    return tape


@dataclass(frozen=True)
class _Run:
    recording: Recording
    output: Tensor  # a copy


def _record_once(compute: Callable[[], Tensor], allocator: TrackedAllocator) -> _Run:
    allocator.restart()
    trace = Trace(allocator)
    with listening(trace.launch), _Recorder(allocator, trace):
        output = compute()
    if allocator.number_of(output) is None:
        raise RecordingRefused("the output does not come from a recorded operation")
    run = _Run(trace.finish(output), output.clone())
    del output
    if allocator.num_open:
        gc.collect()
    if allocator.num_open:
        raise RecordingRefused("the model keeps a result for later")
    return run


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operation of torch between entering and leaving."""

    def __init__(self, allocator: TrackedAllocator, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocator = allocator
        self._trace = trace

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
            return self._allocator.allocate(func(*args, **kwargs))
        return self._compute(func, args, kwargs)

    def _compute(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Computes in native code where that gives torch's own result to the bit, else with
        torch."""
        form = NATIVE_FORMS.get(func)
        if form is None:
            return self._leave_to_torch(func, args, kwargs)
        mark = self._trace.mark()
        before = args[0].clone() if func._schema.is_mutable else None
        expected = func(*(args if before is None else (before.clone(), *args[1:])), **kwargs)
        out = self._allocator.allocate(expected) if before is None else args[0]
        try:
            form(out, *args, **kwargs)
        except NoNativeForm:
            pass  # of a cat, some parts may be there already
        else:
            if _same(out, expected):
                return out
        self._trace.forget(mark)
        if before is not None:
            out.copy_(before)
        return self._leave_to_torch(func, args, kwargs)

    def _leave_to_torch(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        fresh = func(*args, **kwargs)
        results = None if func._schema.is_mutable else tree_map(self._lend, fresh)
        self._trace.torch_operation(func, args, kwargs, results)
        return fresh if results is None else results

    def _lend(self, fresh: Any) -> Any:
        return self._allocator.allocate(fresh).copy_(fresh) if isinstance(fresh, Tensor) else fresh


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns whether all numbers are equal; a NaN equals another NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124


def _steers_the_host(func: OpOverload, args: Any) -> bool:
    """Returns whether a number, or the size of a result, depends on values or on chance."""
    if func in _INDEXING:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not _STEERING.isdisjoint(func.tags)


def _returns_alias(func: OpOverload) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)

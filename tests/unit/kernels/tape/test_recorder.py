"""What a tape computes when it is played, and what is not recorded at all."""

import ctypes
import functools
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.lora import cast, random_operand, run_segments
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.gated_activation.cpu import gated_silu
from loraplex.kernels.lora import cpu as lora
from loraplex.kernels.lora import naive
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.tape.affine import Sizes
from loraplex.kernels.tape.recorder import RecordingRefused, record
from loraplex.kernels.tape.tape import NativeSegment, Tape, TorchCall

pytestmark = pytest.mark.usefixtures("native_kernels")


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


TABLE, WEIGHT = sample(10, 64), sample(64, 64)
SCALE = torch.tensor(25.25, dtype=torch.bfloat16)


MOST = 20  # rows of a layer's input


def once(compute: Callable[[], Tensor]) -> Tape:
    """A tape of a computation whose sizes are always the same."""
    return record(lambda _: compute, (), (), ())


class Layer:
    """A bit of everything: views, broadcasts, conversions, in-place changes, native launches."""

    def __init__(self) -> None:
        self.ids = torch.arange(MOST) % 10
        self.x = sample(MOST, 64)
        self.order = torch.arange(MOST) // 2

    def at(self, sizes: Sizes) -> Callable[[], Tensor]:
        num_rows, num_chosen = sizes
        self.order[:num_chosen] %= num_rows
        return lambda: self.compute(num_rows, num_chosen)

    def compute(self, num_rows: int, num_chosen: int) -> Tensor:
        x = self.x[:num_rows]
        hidden = functional.embedding(self.ids[:num_rows], TABLE) * SCALE + x
        lower, upper = hidden.chunk(2, dim=-1)
        turned = hidden * 0.3 + torch.cat((-upper, lower), dim=-1) * x[:, :1]
        heads = torch.tanh(turned.float()).to(torch.bfloat16).view(num_rows, 4, 16).transpose(0, 1)
        flat = functional.linear(heads.reshape(num_rows, 64) / 3.0 - 1, WEIGHT)
        flat[:, 5:9] += x[:, 5:9]
        sums = torch.zeros(num_rows, 64).copy_(flat)
        sums.mul_(torch.full((64,), 2.0))
        return gated_silu(sums.to(torch.bfloat16))[None, self.order[:num_chosen]]

    def refresh(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids.copy_(torch.randint(10, (MOST,), generator=generator))
        self.x.copy_(torch.randn(MOST, 64, generator=generator))
        self.order.copy_(torch.randint(MOST, (MOST,), generator=generator))

    def record(self) -> Tape:
        with torch.inference_mode():
            return record(self.at, (5, 3), ((7, 2), (1, 1)), (MOST, MOST))


@functools.cache
def recorded() -> tuple[Layer, Tape]:
    layer = Layer()
    return layer, layer.record()


@given(num_rows=st.integers(1, MOST), num_chosen=st.integers(1, MOST), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_a_tape_computes_at_any_sizes_from_what_is_in_the_inputs(
    num_rows: int, num_chosen: int, seed: int
) -> None:
    layer, tape = recorded()
    layer.refresh(seed)
    compute = layer.at((num_rows, num_chosen))

    with torch.inference_mode():
        tape.arena.fill_(0xFF)  # no number of any format
        played = tape.play((num_rows, num_chosen))

        assert torch.equal(played, compute())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_it_can_be_recorded_with_and_without_inference_mode(mode: Callable[[], object]) -> None:
    x = sample(3, 64)
    with mode():  # type: ignore[attr-defined]
        tape = once(lambda: torch.tanh(x + 1.0) * x)
        x.mul_(2.0)

        assert torch.equal(tape.play(()), torch.tanh(x + 1.0) * x)


def test_a_row_without_numbers_does_not_keep_a_computation_from_being_recorded() -> None:
    x = sample(40, 64)
    x[3] = float("nan")

    with torch.inference_mode():
        tape = once(lambda: (x + 1.0) * x)

    assert [type(step) for step in tape.steps] == [NativeSegment]


def test_what_torch_alone_can_do_stands_between_native_segments() -> None:
    tape = Layer().record()

    kinds = [step.function if isinstance(step, TorchCall) else NativeSegment for step in tape.steps]
    tanh, product = torch.ops.aten.tanh.default, torch.ops.aten.mm.default
    assert kinds == [NativeSegment, tanh, NativeSegment, product, NativeSegment]


LONE_NUMBERS: dict[str, Callable[[Tensor], object]] = {
    "a constant": lambda x: 0.3,
    "a wide number": lambda x: torch.amax(x).float() / 3,
    "a narrow number": torch.amax,
}


@pytest.mark.parametrize("number", LONE_NUMBERS.values(), ids=LONE_NUMBERS)
def test_a_lone_number_is_rounded_as_torch_does(number: Callable[[Tensor], Tensor]) -> None:
    x = sample(40, 64)

    def compute() -> Tensor:
        value = number(x)
        parts = [x + value, x - value, x * value, x / value]
        if isinstance(value, Tensor):
            parts += [value + x, value - x, value * x, value / x]
        return torch.stack(parts)

    with torch.inference_mode():
        tape = once(compute)
        x.mul_(1.7)

        assert torch.equal(tape.play(()), compute())


def test_arithmetic_with_lone_numbers_needs_no_torch() -> None:
    x, number = sample(40, 64), torch.tensor(0.3, dtype=torch.bfloat16)

    with torch.inference_mode():
        tape = once(lambda: number * ((x + 0.3) / number - number) * 3.0)

    assert [type(step) for step in tape.steps] == [NativeSegment]


def test_memory_is_used_again_within_a_tape() -> None:
    x = sample(64, 1024)

    def add(times: int) -> Tensor:
        out = x
        for _ in range(times):
            out = out + 1.0
        return out

    with torch.inference_mode():
        few, many = once(lambda: add(3)), once(lambda: add(30))

    assert few.arena.nbytes == many.arena.nbytes


def test_a_launch_uses_as_many_threads_as_its_sizes_are_worth() -> None:
    rows = torch.zeros(4096, 1024)

    with torch.inference_mode():
        tape = record(lambda sizes: lambda: rows[: sizes[0]] + 1.0, (2,), ((5,),), (4096,))
        counts = [_threads(tape, num_rows) for num_rows in (1, 4096)]

    assert counts == [1, torch.get_num_threads()]


def _threads(tape: Tape, num_rows: int) -> int:
    tape.play((num_rows,))
    (segment,) = tape.steps
    call = (ctypes.c_int64 * 7).from_address(segment.address)  # the function and what it is given
    return call[6]


def test_what_another_thread_does_meanwhile_is_not_recorded() -> None:
    x, others = sample(4, 8), sample(2, 16)

    def compute() -> Tensor:
        other = threading.Thread(target=gated_silu, args=(others,))
        other.start()
        other.join()
        return x + 1.0

    with torch.inference_mode():
        tape = once(compute)

    (segment,) = tape.steps
    assert isinstance(segment, NativeSegment)
    assert segment.num_calls == 1


def _branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "a branch": _branch,
    "a number read": lambda x: x * float(x.max()),
    "a list read": lambda x: x * x[0].tolist()[0],
    "an array read": lambda x: x * float(x.float().numpy().max()),
    "a size that depends on values": lambda x: x[x > 0].sum() * x,
    "chance": torch.rand_like,
}


@pytest.mark.parametrize("compute", REFUSED.values(), ids=REFUSED)
def test_what_values_or_chance_decide_is_not_recorded(compute: Callable[[Tensor], Tensor]) -> None:
    x = sample(4, 8)

    with torch.inference_mode(), pytest.raises(RecordingRefused):
        once(lambda: compute(x))


OTHER_AT_OTHER_SIZES: dict[str, Callable[[int], Tensor]] = {
    "other steps": lambda n: X[:n] + 1.0 if n < 7 else X[:n] * 2.0,
    "another constant": lambda n: X[:n] * float(n),
    "another constant tensor": lambda n: X[:n] * torch.tensor(float(n)),
    "a shape that is no sum": lambda n: X[: n * n].clone(),
}
X = sample(100, 8)


@pytest.mark.parametrize("compute", OTHER_AT_OTHER_SIZES.values(), ids=OTHER_AT_OTHER_SIZES)
def test_what_changes_with_the_sizes_otherwise_than_in_its_shapes_is_not_recorded(
    compute: Callable[[int], Tensor],
) -> None:
    with torch.inference_mode(), pytest.raises(RecordingRefused):
        record(lambda sizes: lambda: compute(sizes[0]), (3,), ((7,),), (10,))


def test_what_is_different_at_each_call_is_not_recorded() -> None:
    x, total = sample(4, 8), torch.zeros(4, 8)

    with torch.inference_mode(), pytest.raises(RecordingRefused, match="another result"):
        once(lambda: total.add_(x) * 1.0)


def test_a_result_that_is_kept_for_later_is_not_recorded() -> None:
    x, kept = sample(4, 8), []

    def compute() -> Tensor:
        kept.append(x + 1.0)
        return kept[0] * 2.0

    with torch.inference_mode(), pytest.raises(RecordingRefused, match="keeps a result"):
        once(compute)


def test_a_float32_linear_recorded_before_its_first_adapter_reads_it_as_it_is() -> None:
    table, weights = lora.LoRATable(1, torch.bfloat16), random_operand(16, [(0, 32, 4)])
    batch = LoRABatch.build([0, -1, 0])
    assert batch is not None
    base, x = sample(3, 32, dtype=torch.float32), sample(3, 16, dtype=torch.float32)
    want = base.clone()
    run_segments(naive, want, x, [(torch.tensor([0, 2]), weights)])

    def compute() -> Tensor:
        out = base.clone()
        lora.add_lora(out, x, table, batch)
        return out

    with torch.inference_mode():
        tape = once(compute)
        table.set(0, cast(weights, torch.bfloat16))
        got = tape.play(())

    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)

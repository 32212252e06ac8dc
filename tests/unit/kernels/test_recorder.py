"""What a tape computes when it is played, and what is not recorded at all."""

from collections.abc import Callable

import pytest
import torch
from support.lora import cast, random_operand, run_segments
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.gated_activation.cpu import gated_silu
from loraplex.kernels.lora import cpu as lora
from loraplex.kernels.lora import naive
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.native.arena import Arena
from loraplex.kernels.native.build import NativeUnavailable
from loraplex.kernels.native.library import native
from loraplex.kernels.native.recorder import RecordingRefused, record
from loraplex.kernels.native.tape import NativeSegment, TorchCall


@pytest.fixture(autouse=True)
def _native() -> None:
    try:
        native()
    except NativeUnavailable as error:
        pytest.skip(str(error))


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


TABLE, WEIGHT = sample(10, 64), sample(64, 64)
SCALE = torch.tensor(25.25, dtype=torch.bfloat16)


class Layer:
    """A bit of everything: views, broadcasts, conversions, in-place changes, native launches."""

    def __init__(self) -> None:
        self.ids = torch.tensor([1, 2, 3])
        self.x = sample(3, 64)

    def __call__(self) -> Tensor:
        hidden = functional.embedding(self.ids, TABLE) * SCALE + self.x
        lower, upper = hidden.chunk(2, dim=-1)
        turned = hidden * 0.3 + torch.cat((-upper, lower), dim=-1) * self.x[:, :1]
        heads = torch.tanh(turned.float()).to(torch.bfloat16).view(3, 4, 16).transpose(0, 1)
        flat = functional.linear(heads.reshape(3, 64) / 3.0 - 1, WEIGHT)
        flat[:, 5:9] += self.x[:, 5:9]
        sums = torch.zeros(3, 64).copy_(flat)
        sums.mul_(torch.full((64,), 2.0))
        return gated_silu(sums.to(torch.bfloat16))

    def refresh(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids.copy_(torch.randint(10, (3,), generator=generator))
        self.x.copy_(torch.randn(3, 64, generator=generator))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_tape_computes_anew_from_what_is_in_the_inputs(mode: Callable[[], object]) -> None:
    layer = Layer()
    with mode():  # type: ignore[attr-defined]
        tape = record(layer, Arena())
        layer.refresh(seed=5)
        played = tape.play().clone()

        assert torch.equal(played, layer())


def test_a_row_without_numbers_does_not_keep_a_computation_from_being_recorded() -> None:
    x = sample(40, 64)
    x[3] = float("nan")

    with torch.inference_mode():
        tape = record(lambda: (x + 1.0) * x, Arena())

    assert [type(step) for step in tape.steps] == [NativeSegment]


def test_what_torch_alone_can_do_stands_between_native_segments() -> None:
    with torch.inference_mode():
        tape = record(Layer(), Arena())

    kinds = [
        step.operation if isinstance(step, TorchCall) else NativeSegment for step in tape.steps
    ]
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
        tape = record(compute, Arena())
        x.mul_(1.7)

        assert torch.equal(tape.play(), compute())


def test_arithmetic_with_lone_numbers_needs_no_torch() -> None:
    x, number = sample(40, 64), torch.tensor(0.3)

    with torch.inference_mode():
        tape = record(lambda: number * ((x + 0.3) / number - number) * 3.0, Arena())

    assert [type(step) for step in tape.steps] == [NativeSegment]


def test_tapes_share_an_arena() -> None:
    arena = Arena()
    with torch.inference_mode():
        record(Layer(), arena)
        size = arena.num_bytes
        for _ in range(3):
            record(Layer(), arena)

    assert arena.num_bytes == size


def test_memory_is_used_again_within_a_tape() -> None:
    x, arenas = sample(64, 1024), (Arena(), Arena())

    def add(times: int) -> Tensor:
        out = x
        for _ in range(times):
            out = out + 1.0
        return out

    with torch.inference_mode():
        record(lambda: add(3), arenas[0])
        record(lambda: add(30), arenas[1])

    assert arenas[0].num_bytes == arenas[1].num_bytes


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
        record(lambda: compute(x), Arena())


def test_what_is_different_at_each_call_is_not_recorded() -> None:
    x, total = sample(4, 8), torch.zeros(4, 8)

    with torch.inference_mode(), pytest.raises(RecordingRefused, match="another result"):
        record(lambda: total.add_(x) * 1.0, Arena())


def test_a_result_that_is_kept_for_later_is_not_recorded() -> None:
    x, kept = sample(4, 8), []

    def compute() -> Tensor:
        kept.append(x + 1.0)
        return kept[0] * 2.0

    with torch.inference_mode(), pytest.raises(RecordingRefused, match="keeps a result"):
        record(compute, Arena())


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
        tape = record(compute, Arena())
        table.set(0, cast(weights, torch.bfloat16))
        got = tape.play()

    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)

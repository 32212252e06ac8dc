"""The naive LoRA kernel against one dense matmul per row, in float64."""

import pytest
import torch
from support.models.lora import Segment, batch_of, fill_table, random_operand, run_segments

from loraplex.kernels.lora import naive
from loraplex.kernels.lora.operands import LoRAOperand


def operand(
    generator: torch.Generator, in_features: int, slices: list[tuple[int, int, int]]
) -> LoRAOperand:
    return random_operand(in_features, slices, generator=generator)


def dense(weights: LoRAOperand, width: int) -> torch.Tensor:
    """[width, in] the whole delta of the weight, in float64."""
    delta = torch.zeros(width, weights.a.shape[1], dtype=torch.float64)
    first = 0
    for start, b, scaling in weights.slices:
        rank = b.shape[1]
        a = weights.a[first : first + rank].double()
        delta[start : start + b.shape[0]] += scaling * (b.double() @ a)
        first += rank
    return delta


def expected(out: torch.Tensor, x: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
    want = out.double()
    for rows, weights in segments:
        want[rows] += x[rows].double() @ dense(weights, out.shape[1]).t()
    return want


def assert_adds_the_dense_delta(
    out: torch.Tensor, x: torch.Tensor, segments: list[Segment]
) -> None:
    want = expected(out, x, segments)
    run_segments(naive, out, x, segments)
    scale = want.abs().max() if want.numel() else torch.tensor(1.0)
    torch.testing.assert_close(out.double(), want, atol=2e-6 * float(scale), rtol=1e-5)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


RANKS = [1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256]


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank(rank: int, generator: torch.Generator) -> None:
    x, out = torch.randn(5, 63, generator=generator), torch.zeros(5, 100)
    weights = operand(generator, 63, [(0, 100, rank)])
    assert_adds_the_dense_delta(out, x, [(torch.arange(5), weights)])


@pytest.mark.parametrize("in_features", [1, 63, 64, 100, 3424])
@pytest.mark.parametrize("out_features", [1, 64, 100, 3424])
def test_every_width(in_features: int, out_features: int, generator: torch.Generator) -> None:
    x = torch.randn(3, in_features, generator=generator)
    out = torch.randn(3, out_features, generator=generator)
    weights = operand(generator, in_features, [(0, out_features, 4)])
    assert_adds_the_dense_delta(out, x, [(torch.tensor([2, 0]), weights)])


def test_mixed_ranks_unequal_slices_and_base_rows(generator: torch.Generator) -> None:
    x, out = torch.randn(40, 48, generator=generator), torch.randn(40, 96, generator=generator)
    rows = torch.randperm(40, generator=generator)
    segments = [
        (rows[:9], operand(generator, 48, [(0, 64, 4), (64, 16, 64), (80, 16, 1)])),
        (rows[9:10], operand(generator, 48, [(64, 16, 16)])),
        (rows[10:31], operand(generator, 48, [(0, 64, 7), (80, 16, 3)])),
    ]
    untouched = out[rows[31:]].clone()
    assert_adds_the_dense_delta(out, x, segments)
    assert torch.equal(out[rows[31:]], untouched)


def test_a_segment_beside_it_changes_no_bit_of_an_adapters_rows(
    generator: torch.Generator,
) -> None:
    x, out = torch.randn(8, 32, generator=generator), torch.randn(8, 32, generator=generator)
    mine: Segment = (torch.arange(4), operand(generator, 32, [(0, 32, 4)]))
    other: Segment = (torch.arange(4, 8), operand(generator, 32, [(0, 32, 64)]))
    alone, together = out.clone(), out.clone()
    run_segments(naive, alone, x, [mine])
    run_segments(naive, together, x, [mine, other])
    assert torch.equal(alone[:4], together[:4])


@pytest.mark.parametrize("num_rows", [0, 1, 70_000])
def test_every_number_of_rows(num_rows: int, generator: torch.Generator) -> None:
    x, out = torch.randn(num_rows, 4, generator=generator), torch.zeros(num_rows, 3)
    weights = operand(generator, 4, [(0, 3, 2)])
    assert_adds_the_dense_delta(out, x, [(torch.arange(num_rows), weights)])


def test_an_adapter_without_rows_changes_nothing(
    generator: torch.Generator,
) -> None:
    x, out = torch.randn(3, 8, generator=generator), torch.randn(3, 8, generator=generator)
    before = out.clone()
    run_segments(
        naive, out, x, [(torch.empty(0, dtype=torch.int64), operand(generator, 8, [(0, 8, 2)]))]
    )
    assert torch.equal(out, before)


def test_views_with_strides_are_read_and_written_in_place(generator: torch.Generator) -> None:
    x = torch.randn(64, 10, generator=generator).t()  # [10, 64], not contiguous
    whole = torch.randn(10, 50, generator=generator)
    weights = operand(generator, 64, [(0, 20, 4)])
    assert_adds_the_dense_delta(whole[:, 5:25], x, [(torch.arange(3, 9), weights)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_at_the_end(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, out = (torch.randn(6, 32, generator=generator).to(dtype) for _ in range(2))
    a, slices = operand(generator, 32, [(0, 32, 8)])
    weights = LoRAOperand(a.to(dtype), (slices[0]._replace(b=slices[0].b.to(dtype)),))
    segments: list[Segment] = [(torch.arange(6), weights)]
    want = expected(out, x, segments).to(dtype)
    run_segments(naive, out, x, segments)
    # Float32 sums may fall on the other side of a rounding border, by one unit in the last place.
    torch.testing.assert_close(out, want, atol=0, rtol=torch.finfo(dtype).eps)


def test_an_embedding_looks_its_delta_up(generator: torch.Generator) -> None:
    out = torch.randn(4, 16, generator=generator)
    weights = operand(generator, 50, [(0, 16, 3)])
    ids = torch.tensor([7, 49, 7, 0])
    rows = torch.tensor([0, 1, 3])
    want = out.double()
    want[rows] += 3.0 * dense(weights, 16).t()[ids[rows]]
    batch = batch_of([(rows, weights)], 4)
    assert batch is not None
    naive.add_embedding_lora(out, ids, fill_table(naive.LoRATable(1), [weights]), batch, 3.0)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)

"""The eight-bit linear: the native one against the naive one, that against the exact product."""

import pytest
import torch

from loraplex.kernels.int8_linear import cpu, naive

ROWS = [0, 1, 2, 3, 5, 7, 8, 9, 12, 13, 25, 100]
SHAPES = [(1, 1), (31, 2), (33, 63), (64, 100), (100, 130), (40, 256), (96, 515)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """But for the order of float32 sums, which may move a number by one step of bfloat16."""
    assert torch.equal(got.isnan(), want.isnan())
    scale = float(want.nan_to_num().abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5 * scale, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_near_the_exact_product(shape: tuple[int, int]) -> None:
    x, weight = random(9, shape[1]), random(*shape)
    exact = x.double() @ weight.double().t()

    got = naive.linear(x, naive.Int8Weight.pack(weight))

    norms = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert float(((got.double() - exact).abs() / norms).max()) < 0.02


def test_an_outlier_costs_its_own_group_only() -> None:
    x, weight = random(1, 256), naive.Int8Weight.pack(random(8, 256))
    x[0, 0] = 1e4
    lone = x.clone()
    lone[0, 128:] = 0

    rest = naive.linear(x, weight).double() - naive.linear(lone, weight).double()

    x[0, :128] = 0
    exact = x.double() @ (weight.integers * weight.scales).double().t()
    assert float((rest - exact).abs().max()) < 2**-7 * 1e4 * 4  # the sum's own rounding


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_size(num_rows: int, shape: tuple[int, int]) -> None:
    x, weight = random(num_rows, shape[1]), random(*shape)

    got = cpu.linear(x, cpu.Int8Weight.pack(weight))

    assert_same(got, naive.linear(x, naive.Int8Weight.pack(weight)))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_rounded_alike(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    weight[-1] = 0

    assert torch.equal(cpu.Int8Weight.pack(weight).unpack(), naive.Int8Weight.pack(weight).unpack())


@pytest.mark.usefixtures("native")
def test_rows_are_looked_up_as_an_embedding_does() -> None:
    weight, ids = random(50, 70), torch.tensor([[0, 49], [31, 32]])

    rows = cpu.Int8Weight.pack(weight).rows(ids)

    assert torch.equal(rows, naive.Int8Weight.pack(weight).rows(ids))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("columns", [1, 31, 33, 48])
def test_a_bias_is_added_before_rounding(columns: int) -> None:
    x, weight, bias = random(5, 16), random(columns, 16), torch.linspace(-3, 3, columns)

    got = cpu.linear(x, cpu.Int8Weight.pack(weight), bias)

    assert_same(got, naive.linear(x, naive.Int8Weight.pack(weight), bias))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others(bad: float) -> None:
    x, weight = random(3, 64), cpu.Int8Weight.pack(random(10, 64))
    clean = cpu.linear(x, weight)
    x[1, 5] = bad

    got = cpu.linear(x, weight)

    assert bool(got[1].isnan().all())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.usefixtures("native")
def test_a_row_of_zeros_gives_zeros() -> None:
    weight = cpu.Int8Weight.pack(random(10, 64))

    assert not cpu.linear(torch.zeros(2, 64, dtype=torch.bfloat16), weight).any()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("num_rows", [4, 30])
def test_views_with_strides(num_rows: int) -> None:
    wide = random(num_rows, 101)
    weight = random(40, 64)

    got = cpu.linear(wide[:, 5:69], cpu.Int8Weight.pack(weight))

    assert torch.equal(got, cpu.linear(wide[:, 5:69].contiguous(), cpu.Int8Weight.pack(weight)))
    assert torch.equal(got[:1], cpu.linear(wide[:1, 5:69], cpu.Int8Weight.pack(weight)))

"""The packed bfloat16 linear against float64."""

import pytest
import torch

from loraplex.kernels.linear.cpu import PackedWeight, linear

pytestmark = pytest.mark.usefixtures("native")

ROWS = [0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 24, 25, 33, 100]
SHAPES = [(1, 1), (31, 2), (32, 64), (33, 63), (64, 100), (100, 1), (3424, 96), (96, 3424)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rounded once at the end; terms that cancel leave the error of float32 sums."""
    scale = float(want.abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5 * scale)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_size(num_rows: int, shape: tuple[int, int]) -> None:
    x, weight = random(num_rows, shape[1]), random(*shape)

    assert_close(linear(x, PackedWeight.pack(weight)), x.double() @ weight.double().t())


@pytest.mark.parametrize("columns", [1, 31, 33, 48])
def test_a_bias_is_added_before_rounding(columns: int) -> None:
    x, weight = random(5, 16), random(columns, 16)
    bias = torch.linspace(-3, 3, columns)

    out = linear(x, PackedWeight.pack(weight), bias)

    assert_close(out, x.double() @ weight.double().t() + bias.double())


def test_leading_dimensions_are_kept() -> None:
    x, weight = random(2, 3, 8), random(5, 8)

    out = linear(x, PackedWeight.pack(weight))

    assert out.shape == (2, 3, 5)
    assert_close(out, x.double() @ weight.double().t())


@pytest.mark.parametrize("view", ["rows apart", "transposed", "odd width", "odd stride"])
def test_views_with_strides(view: str) -> None:
    x = {
        "rows apart": random(9, 64)[:, 16:48],
        "transposed": random(32, 9).t(),
        "odd width": random(9, 64)[:, 5:36],
        "odd stride": random(9, 65)[:, 1:33],
    }[view]
    weight = random(40, x.shape[1])

    assert_close(linear(x, PackedWeight.pack(weight)), x.double() @ weight.double().t())


def test_a_row_does_not_depend_on_its_neighbours_values() -> None:
    x, packed = random(30, 64), PackedWeight.pack(random(40, 64))
    alone = linear(x, packed)
    x[1:] = float("nan")

    assert torch.equal(linear(x, packed)[0], alone[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_weight_is_the_weight(shape: tuple[int, int]) -> None:
    weight = random(*shape)

    assert torch.equal(PackedWeight.pack(weight).unpack(), weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_looked_up_as_an_embedding_does(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    ids = torch.randint(shape[0], (2, 7))
    ids[0, 0] = shape[0] - 1

    assert torch.equal(PackedWeight.pack(weight).rows(ids), weight[ids])


def test_no_rows_are_looked_up_without_ids() -> None:
    packed = PackedWeight.pack(random(4, 6))

    assert packed.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 6)

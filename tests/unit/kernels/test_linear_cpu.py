"""The packed linear against float64."""

import pytest
import torch

from loraplex.kernels.linear.cpu import PackedWeight, linear

pytestmark = pytest.mark.usefixtures("native")

ROWS = [0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 24, 25, 33, 100]
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(1, 1), (31, 2), (32, 64), (33, 63), (64, 100), (100, 1), (3424, 96), (96, 3424)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rounded once at the end; terms that cancel leave the error of float32 sums."""
    scale = float(want.abs().max()) if want.numel() else 1.0
    rounding = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=1e-5 * scale)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(num_rows, shape[1], dtype=dtype), random(*shape, dtype=dtype)

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_number_of_rows(dtype: torch.dtype) -> None:
    x, packed = random(100, 2050, dtype=dtype), PackedWeight.pack(random(70, 2050, dtype=dtype))
    together = linear(x, packed)

    for num_rows in ROWS:
        assert torch.equal(linear(x[:num_rows], packed), together[:num_rows])
        assert torch.equal(linear(x[100 - num_rows :], packed), together[100 - num_rows :])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_weight_is_the_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(*shape, dtype=dtype)

    assert torch.equal(PackedWeight.pack(weight).unpack(), weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_looked_up_as_an_embedding_does(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = random(*shape, dtype=dtype)
    ids = torch.randint(shape[0], (2, 7))
    ids[0, 0] = shape[0] - 1

    assert torch.equal(PackedWeight.pack(weight).rows(ids), weight[ids])


def test_no_rows_are_looked_up_without_ids() -> None:
    packed = PackedWeight.pack(random(4, 6))

    assert packed.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 6)

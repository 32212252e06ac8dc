"""Torch's simple operations in native code, to the bit."""

import ctypes
from itertools import product

import pytest
import torch
from torch import Tensor

from loraplex.kernels.tape.elementwise import NoNativeForm, arithmetic, convert, gather_rows

pytestmark = pytest.mark.usefixtures("native")

FLOAT, HALF = torch.float32, torch.bfloat16
OPERATIONS = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}


def sample(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 30
    return numbers.to(dtype)


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan")) if like.is_floating_point() else like.clone()


VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "every other": lambda x: torch.stack((x, x), dim=-1).flatten(2)[..., ::2],
    "one row": lambda x: x[:1],
    "one column": lambda x: x[..., :1],
    "one number": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtypes", [(FLOAT, FLOAT), (FLOAT, HALF), (HALF, FLOAT), (HALF, HALF)])
def test_arithmetic_broadcasts_and_rounds_as_torch_does(
    operation: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    for a_view, b_view in product(VIEWS.values(), repeat=2):
        a = a_view(sample(3, 5, 33, dtype=dtypes[0], seed=1))
        b = b_view(sample(3, 5, 33, dtype=dtypes[1], seed=2))
        want = OPERATIONS[operation](a.float(), b.float()).to(torch.promote_types(*dtypes))
        out = poisoned(want)

        arithmetic(operation, a, b, out)

        assert torch.equal(out, want)


def test_extreme_numbers_are_those_of_torch() -> None:
    infinity = float("inf")
    numbers = torch.tensor([0.0, -0.0, 1e-40, 3e38, infinity, -infinity, float("nan"), 1.0])
    a, b = (part.to(HALF).contiguous() for part in torch.meshgrid(numbers, numbers, indexing="ij"))
    for operation, torch_operation in OPERATIONS.items():
        out = torch.zeros_like(a)

        arithmetic(operation, a, b, out)

        torch.testing.assert_close(out, torch_operation(a, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("source", "target"),
    [(FLOAT, HALF), (HALF, FLOAT), (torch.int64, FLOAT), (HALF, HALF), (torch.int64, torch.int64)],
)
def test_numbers_are_converted_and_copied(
    source: torch.dtype, target: torch.dtype, view: str
) -> None:
    numbers = VIEWS[view](sample(3, 5, 33).to(source))
    out = poisoned(torch.zeros(3, 5, 33, dtype=target).transpose(0, 1)).transpose(0, 1)

    convert(numbers, out)

    assert torch.equal(out, numbers.to(target).expand(3, 5, 33))


def test_many_numbers_are_shared_among_threads(native: ctypes.CDLL) -> None:
    a, b = sample(300, 1000, dtype=HALF), sample(300, 1000, dtype=HALF, seed=3)
    out = poisoned(a)

    arithmetic("+", a, b, out)

    assert torch.equal(out, a + b)


def test_rows_are_gathered() -> None:
    table = sample(11, 40, dtype=HALF)[:, :24]
    ids = torch.tensor([[10, 0], [-1, -11]])
    out = torch.full((2, 2, 24), float("nan"), dtype=HALF)

    gather_rows(table, ids, out)

    assert torch.equal(out, table[ids])


def test_nothing_is_done_where_there_are_no_numbers() -> None:
    out = torch.empty(0, 4)

    arithmetic("+", sample(1, 4), sample(0, 4), out)

    assert out.numel() == 0


def test_other_formats_have_no_native_form() -> None:
    x = torch.zeros(4, dtype=torch.float64)

    with pytest.raises(NoNativeForm):
        arithmetic("+", x, x, x)

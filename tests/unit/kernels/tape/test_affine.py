"""Numbers that follow from sizes by sums of multiples."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.tape.affine import Affine, with_steps

SMALL = st.integers(-1000, 1000)
SIZES = st.tuples(*[st.integers(1, 5000)] * 3)


@given(coefficients=st.lists(st.tuples(*[SMALL] * 4), min_size=1), base=SIZES, sizes=SIZES)
def test_numbers_at_a_few_sizes_tell_those_at_all_others(
    coefficients: list[tuple[int, int, int, int]],
    base: tuple[int, int, int],
    sizes: tuple[int, int, int],
) -> None:
    known = Affine(torch.tensor(coefficients))

    told = Affine.through(base, [known.at(s).tolist() for s in with_steps(base)])

    assert told.at(sizes).tolist() == known.at(sizes).tolist()


def test_only_what_depends_on_a_size_varies() -> None:
    numbers = Affine(torch.tensor([[5, 0, 0], [5, 0, 1], [0, 2, 0]]))

    assert numbers.varies.tolist() == [False, True, True]


def test_numbers_are_the_same_at_all_sizes_where_there_are_no_sizes() -> None:
    assert Affine.through((), [[3, 4]]).at(()).tolist() == [3, 4]

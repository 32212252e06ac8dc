"""Every request has a seed, and a server started again with --seed draws the same ones."""

import pytest

from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.sampling_params import SamplingParams

UNSEEDED = SamplingParams()


def drawn(seed: int | None, count: int = 5) -> list[int]:
    seeds = RequestSeeds(seed)
    return [seeds.of(UNSEEDED) for _ in range(count)]


@pytest.mark.parametrize("seed", [None, 0])
def test_a_requests_own_seed_is_taken(seed: int | None) -> None:
    assert RequestSeeds(seed).of(SamplingParams(seed=-5)) == -5


@pytest.mark.parametrize("seed", [None, 0])
def test_requests_without_a_seed_get_different_ones(seed: int | None) -> None:
    assert len(set(drawn(seed, 1000))) == 1000


def test_a_seed_decides_what_is_drawn() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_without_a_seed_nobody_knows_what_is_drawn() -> None:
    assert drawn(None) != drawn(None)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_drawn_seed_fits_where_a_callers_would(seed: int | None) -> None:
    assert all(-(2**63) <= seed < 2**63 for seed in drawn(seed, 1000))


def test_requests_with_a_seed_do_not_shift_those_without() -> None:
    seeds = RequestSeeds(1)
    seeds.of(SamplingParams(seed=9))

    assert seeds.of(UNSEEDED) == drawn(1)[0]

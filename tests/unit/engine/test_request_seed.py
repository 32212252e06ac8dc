"""Every request has a seed, and an engine started again draws the same ones."""

from support.engine.scheduling import generate_request

from loraplex.engine.sequence import RequestSeeds


def drawn(engine_seed: int, count: int = 5) -> list[int]:
    seeds = RequestSeeds(engine_seed)
    return [seeds.of(generate_request("r", [1])) for _ in range(count)]


def test_a_requests_own_seed_is_taken() -> None:
    assert RequestSeeds(0).of(generate_request("r", [1], seed=-5)) == -5


def test_requests_without_a_seed_get_different_ones() -> None:
    assert len(set(drawn(0, 1000))) == 1000


def test_the_engines_seed_decides_what_is_drawn() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_drawn_seed_fits_where_a_callers_would() -> None:
    assert all(-(2**63) <= seed < 2**63 for seed in drawn(3, 1000))


def test_requests_with_a_seed_do_not_shift_those_without() -> None:
    seeds = RequestSeeds(1)
    seeds.of(generate_request("r", [1], seed=9))

    assert seeds.of(generate_request("r", [1])) == drawn(1)[0]

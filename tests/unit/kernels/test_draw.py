"""Tokens are drawn by the book, natively as in plain torch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loraplex.kernels.draw import cpu, naive
from loraplex.kernels.draw.keys import draw_key
from loraplex.kernels.draw.settings import DrawSettings

CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
]


def settings_of(
    num_draws: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> DrawSettings:
    return DrawSettings(
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), top_k),
        torch.full((num_draws,), top_p),
        torch.full((num_draws,), min_p),
    )


def logits_of(num_rows: int, vocab_size: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def keys_of(num_draws: int) -> Tensor:
    return torch.tensor([draw_key(7, 0, position) for position in range(num_draws)])


def shares(logits: Tensor, **cuts: Any) -> Tensor:
    """[V] the distribution of one row of logits."""
    probs = naive.distribution(
        logits[None], torch.zeros(1, dtype=torch.int64), settings_of(1, **cuts)
    )
    return (probs / probs.sum())[0]


@pytest.mark.parametrize("argument", range(3))
def test_keys_are_uniform_along_each_of_their_arguments(argument: int) -> None:
    keys = [draw_key(*(n if i == argument else 1 for i in range(3))) for n in range(4000)]
    for shift in (0, 32, 59):
        observed = torch.tensor([key >> shift & 15 for key in keys]).bincount(minlength=16)
        assert float(((observed - 250) ** 2 / 250).sum()) < chi_square_limit(15)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 2**31))
def test_a_key_has_no_memory(seed: int, choice: int, position: int) -> None:
    key = draw_key(seed, choice, position)
    draw_key(seed + 1 if seed < 0 else seed - 1, choice, position)

    assert -(2**63) <= key < 2**63
    assert draw_key(seed, choice, position) == key


def test_a_temperature_divides_the_logits() -> None:
    logits = logits_of(1, 50)[0]
    expected = torch.softmax(logits.double() / 0.7, dim=0)
    torch.testing.assert_close(shares(logits, temperature=0.7), expected, atol=1e-7, rtol=1e-6)


def test_top_k_keeps_the_likeliest_and_their_equals() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert (shares(logits, top_k=2) > 0).tolist() == [False, True, True, True, False]


def test_top_p_keeps_the_fewest_that_hold_the_share_and_their_equals() -> None:
    logits = torch.tensor([0.4, 0.1, 0.2, 0.2, 0.1]).log()
    assert (shares(logits, top_p=0.39) > 0).tolist() == [True, False, False, False, False]
    assert (shares(logits, top_p=0.41) > 0).tolist() == [True, False, True, True, False]
    assert (shares(logits, top_p=0.85) > 0).tolist() == [True] * 5


def test_top_p_shares_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (shares(logits, top_k=2, top_p=0.55) > 0).tolist() == [True, False, False, False]


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert (shares(logits, min_p=0.5) > 0).tolist() == [True, True, False]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_token_comes_as_often_as_it_is_likely(module: Any, cuts: dict[str, Any]) -> None:
    logits, num_draws = logits_of(1, 40, spread=1.5), 20_000
    expected = shares(logits[0], **cuts) * num_draws

    rows = torch.zeros(num_draws, dtype=torch.int64)
    tokens = module.draw(logits, rows, settings_of(num_draws, **cuts), keys_of(num_draws))

    observed, possible = tokens.bincount(minlength=40), expected > 0
    assert observed[~possible].sum() == 0
    difference = (observed - expected)[possible]
    chi_square = float((difference**2 / expected[possible]).sum())
    assert chi_square < chi_square_limit(int(possible.sum()) - 1)


def chi_square_limit(degrees: int) -> float:
    """About the 99.9 % point (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 16, 1023, 1025, 9000])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_native_draws_are_the_naive_ones(
    dtype: torch.dtype, vocab_size: int, cuts: dict[str, Any]
) -> None:
    logits = logits_of(3, vocab_size).to(dtype)
    rows = torch.arange(3).repeat_interleave(4)
    settings, keys = settings_of(12, 0.8, **cuts), keys_of(12)

    assert torch.equal(
        cpu.draw(logits, rows, settings, keys), naive.draw(logits, rows, settings, keys)
    )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("spread", [0.0, 1e-3, 40.0])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_flat_and_sharp_distributions(spread: float, cuts: dict[str, Any]) -> None:
    logits, num_draws = logits_of(1, 3000, spread), 100
    rows = torch.zeros(num_draws, dtype=torch.int64)
    settings, keys = settings_of(num_draws, **cuts), keys_of(num_draws)

    native = cpu.draw(logits, rows, settings, keys)

    # Where all are nearly equally likely, float32 cuts some neighbours more or less.
    same = (native == naive.draw(logits, rows, settings, keys)).double().mean()
    assert same >= (0.95 if spread == 1e-3 else 1.0)


def test_near_distributions_mostly_give_the_same_token() -> None:
    num_draws = 400
    logits = logits_of(1, 1000, spread=1.0)
    near = logits + logits_of(1, 1000, spread=0.05, seed=1)
    rows = torch.zeros(num_draws, dtype=torch.int64)
    settings, keys = settings_of(num_draws), keys_of(num_draws)
    first, second = shares(logits[0]), shares(near[0])
    best_possible = float(torch.minimum(first, second).sum())

    same = naive.draw(logits, rows, settings, keys) == naive.draw(near, rows, settings, keys)

    assert float(same.double().mean()) > best_possible - 0.06


def test_many_draws_from_a_large_vocabulary_are_made_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, rows = logits_of(4, 900), torch.tensor([2, 0, 3, 2, 1])
    at_once = naive.draw(logits, rows, settings_of(5, top_p=0.9), keys_of(5))
    sizes: list[int] = []
    distribution = naive.distribution

    def noting(logits: Tensor, rows: Tensor, settings: DrawSettings) -> Tensor:
        probs = distribution(logits, rows, settings)
        sizes.append(probs.numel())
        return probs

    monkeypatch.setattr(naive, "_AT_ONCE", 2000)
    monkeypatch.setattr(naive, "distribution", noting)
    pieces = naive.draw(logits, rows, settings_of(5, top_p=0.9), keys_of(5))

    assert torch.equal(pieces, at_once)
    assert max(sizes) <= 2000


def test_without_cuts_nothing_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows, keys = logits_of(2, 300), torch.tensor([0, 1]), keys_of(2)
    want = naive.draw(logits, rows, settings_of(2, min_p=0.05), keys)
    monkeypatch.setattr(Tensor, "sort", None)

    got = naive.draw(logits, rows, replace(settings_of(2, min_p=0.05), has_cuts=False), keys)

    assert torch.equal(got, want)


@pytest.mark.usefixtures("native")
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(1e-3, 5.0),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_any_settings_cut_natively_what_they_cut_in_plain_torch(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(1, 200, seed=seed).to(torch.bfloat16)
    settings = settings_of(40, temperature, top_k, top_p, min_p)
    rows, keys = torch.zeros(40, dtype=torch.int64), keys_of(40)

    tokens = cpu.draw(logits, rows, settings, keys)

    # A looser cut than asked for, so that a token on the border may fall to either side.
    loose = settings_of(1, temperature, top_k, min(1.0, top_p + 1e-5), min_p * (1 - 1e-5))
    possible = naive.distribution(logits, rows[:1], loose)[0] > 0
    assert possible[tokens].all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
def test_a_draw_is_the_same_alone_and_in_company(module: Any) -> None:
    logits = logits_of(4, 900)
    rows, keys = torch.tensor([2, 0, 3, 2, 1]), keys_of(5)
    together = module.draw(logits, rows, settings_of(5, top_p=0.9), keys)
    alone = [
        module.draw(logits[row : row + 1], rows[:1] * 0, settings_of(1, top_p=0.9), keys[i : i + 1])
        for i, row in enumerate(rows.tolist())
    ]
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
@pytest.mark.parametrize("key", [0, -1, 2**63 - 1])
@pytest.mark.parametrize("temperature", [1e-30, 1.0])
def test_a_token_that_is_masked_is_never_drawn(module: Any, key: int, temperature: float) -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, 41] = -5.0
    keys = torch.tensor([key])
    row = torch.zeros(1, dtype=torch.int64)
    assert module.draw(logits, row, settings_of(1, temperature), keys).tolist() == [41]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
def test_logits_that_are_no_numbers_give_some_token(module: Any) -> None:
    logits = torch.full((1, 100), math.nan)
    row, key = torch.zeros(1, dtype=torch.int64), torch.tensor([5])
    token = int(module.draw(logits, row, settings_of(1, top_p=0.5), key))
    assert 0 <= token < 100


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
def test_no_draws_give_no_tokens(module: Any) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    tokens = module.draw(logits_of(1, 10), empty, settings_of(0), empty)
    assert tokens.shape == (0,)

"""Tokens are drawn by the book, natively as in plain torch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loraplex.kernels.draw import cpu, naive
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


def points_of(num_draws: int) -> Tensor:
    return torch.rand(num_draws, dtype=torch.double, generator=torch.Generator().manual_seed(7))


def shares(logits: Tensor, **cuts: Any) -> Tensor:
    """[V] the distribution of one row of logits."""
    probs = naive.distribution(
        logits[None], torch.zeros(1, dtype=torch.int64), settings_of(1, **cuts)
    )
    return (probs / probs.sum())[0]


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


def test_a_point_falls_to_the_token_whose_share_it_is_in() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).log()
    points = torch.tensor([0.0, 0.24, 0.26, 0.74, 0.76, 0.999999], dtype=torch.double)
    tokens = naive.draw(logits, torch.zeros(6, dtype=torch.int64), settings_of(6), points)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 16, 1023, 1025, 9000])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_native_draws_are_the_naive_ones(
    dtype: torch.dtype, vocab_size: int, cuts: dict[str, Any]
) -> None:
    logits = logits_of(3, vocab_size).to(dtype)
    rows = torch.arange(3).repeat_interleave(4)
    settings, points = settings_of(12, 0.8, **cuts), points_of(12)

    tokens = cpu.draw(logits, rows, settings, points)

    assert_drawn_at(tokens, points, naive.distribution(logits, rows, settings))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("spread", [0.0, 1e-3, 40.0])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_flat_and_sharp_distributions(spread: float, cuts: dict[str, Any]) -> None:
    logits = logits_of(1, 3000, spread)
    rows, settings, points = (
        torch.zeros(30, dtype=torch.int64),
        settings_of(30, **cuts),
        points_of(30),
    )

    tokens = cpu.draw(logits, rows, settings, points)

    # Where all are nearly equally likely, float32 cuts some neighbours more or less.
    slack = 0.0 if spread == 40.0 else 3 / 3000
    assert_drawn_at(tokens, points, naive.distribution(logits, rows, settings), slack)


def assert_drawn_at(tokens: Tensor, points: Tensor, probs: Tensor, slack: float = 0.0) -> None:
    """Each point lies in its token's share, but for the rounding of float32 probabilities."""
    slack += 1e-5
    shares = probs / probs.sum(-1, keepdim=True)
    below = shares.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    own = shares.gather(1, tokens[:, None])[:, 0]
    assert (own > 0).all()
    assert (points < below + slack).all()
    assert (points > below - own - slack).all()


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
    rows, points = torch.zeros(40, dtype=torch.int64), points_of(40)

    tokens = cpu.draw(logits, rows, settings, points)

    # A looser cut than asked for, so that a token on the border may fall to either side.
    loose = settings_of(1, temperature, top_k, min(1.0, top_p + 1e-5), min_p * (1 - 1e-5))
    possible = naive.distribution(logits, rows[:1], loose)[0] > 0
    assert possible[tokens].all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
def test_a_draw_is_the_same_alone_and_in_company(module: Any) -> None:
    logits = logits_of(4, 900)
    rows, points = torch.tensor([2, 0, 3, 2, 1]), points_of(5)
    together = module.draw(logits, rows, settings_of(5, top_p=0.9), points)
    alone = [
        module.draw(
            logits[row : row + 1], rows[:1] * 0, settings_of(1, top_p=0.9), points[i : i + 1]
        )
        for i, row in enumerate(rows.tolist())
    ]
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
@pytest.mark.parametrize("point", [0.0, 0.5, 1.0 - 2**-53])
@pytest.mark.parametrize("temperature", [1e-30, 1.0])
def test_a_token_that_is_masked_is_never_drawn(
    module: Any, point: float, temperature: float
) -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, 41] = -5.0
    points = torch.tensor([point], dtype=torch.double)
    row = torch.zeros(1, dtype=torch.int64)
    assert module.draw(logits, row, settings_of(1, temperature), points).tolist() == [41]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
def test_logits_that_are_no_numbers_give_some_token(module: Any) -> None:
    logits = torch.full((1, 100), math.nan)
    row, point = torch.zeros(1, dtype=torch.int64), torch.tensor([0.5], dtype=torch.double)
    token = int(module.draw(logits, row, settings_of(1, top_p=0.5), point))
    assert 0 <= token < 100


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("module", [naive, cpu], ids=["naive", "cpu"])
def test_no_draws_give_no_tokens(module: Any) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    tokens = module.draw(logits_of(1, 10), empty, settings_of(0), empty.double())
    assert tokens.shape == (0,)

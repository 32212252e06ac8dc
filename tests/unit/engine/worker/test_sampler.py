"""What is sampled follows the parameters, and depends on nothing but the sequence itself."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.kv import sequence_of
from support.models.word_tokenizer import EOS, VOCAB_SIZE
from torch import Tensor

from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.scheduler import SampledToken
from loraplex.engine.scheduling.step_input import ScheduledSequence, logits_rows
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.sequence import Sequence
from loraplex.engine.step import LogitsRows, Logprobs
from loraplex.engine.worker.sampler import Sampler, apply_penalties, draw_settings
from loraplex.kernels.draw.naive import distribution

Floats = NDArray[np.float64]


STOPS = StopChecker(frozenset({EOS}))


def rows_of(*sequences: Sequence, num_samples: int = 1) -> tuple[LogitsRows, ...]:
    return logits_rows(
        [ScheduledSequence(it, it.num_uncomputed_tokens, num_samples) for it in sequences], STOPS
    )


def sample(logits: Tensor, *sequences: Sequence, num_samples: int = 1) -> list[list[SampledToken]]:
    """Samples from the row of logits of each sequence: per sequence, a token for each choice."""
    result = Sampler().sample(logits, rows_of(*sequences, num_samples=num_samples))
    assert result.failed == {}
    return [[only for (only,) in result.samples[sequence.seq_id]] for sequence in sequences]


def token_of(logits: Tensor, sequence: Sequence) -> int:
    return sample(logits.unsqueeze(0), sequence)[0][0].token_id


def noise(seed: int, num_rows: int | None = None) -> Tensor:
    """Logits of [V], or [R, V]."""
    shape = (VOCAB_SIZE,) if num_rows is None else (num_rows, VOCAB_SIZE)
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_output(sequence: Sequence, tokens: list[int]) -> Sequence:
    sequence.token_ids += tokens
    return sequence


def reference_distribution(logits: Floats, params: SamplingParams) -> tuple[Floats, float]:
    """Probabilities [V] by the book, and how close a token was to being on the other side."""
    order = np.argsort(-logits)
    probs = softmax(logits[order] / params.temperature)
    if params.top_k > 0:
        probs = softmax((logits[order] / params.temperature)[: params.top_k])
    before = np.concatenate([[0.0], probs.cumsum()[:-1]])
    least = params.min_p * probs[0]
    margin = min(np.abs(before[1:] - params.top_p).min(initial=1), np.abs(probs - least).min())
    probs = np.where((before < params.top_p) & (probs >= least), probs, 0.0)
    whole = np.zeros(len(logits))
    whole[order[: len(probs)]] = probs / probs.sum()
    return whole, margin


def softmax(values: Floats) -> Floats:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def our_distribution(logits: Tensor, params: SamplingParams) -> Floats:
    settings = draw_settings([params], logits.device)
    probs = distribution(logits[None], torch.zeros(1, dtype=torch.int64), settings)[0]
    return np.asarray(probs / probs.sum())


@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 25, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_every_combination_of_cuts_gives_the_distribution_by_the_book(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = noise(seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, margin = reference_distribution(logits.double().numpy(), params)
    assume(margin > 1e-6 or min_p == 1.0)

    np.testing.assert_allclose(our_distribution(logits, params), expected, atol=1e-6)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
)
def test_draws_are_distributed_as_they_should_be(sampling: dict[str, Any]) -> None:
    logits = noise(3)
    sequences = [sequence_of([1], seed=seed, **sampling) for seed in range(64)]

    drawn = sample(logits.expand(64, -1), *sequences, num_samples=64)

    tokens = [token.token_id for row in drawn for token in row]
    observed = np.bincount(tokens, minlength=VOCAB_SIZE)
    probs, _ = reference_distribution(logits.double().numpy(), sequences[0].sampling)
    assert observed[probs == 0].sum() == 0
    assert chi_square(observed, probs) < chi_square_limit((probs > 0).sum() - 1)


def chi_square(observed: NDArray[np.int64], probs: Floats) -> float:
    possible = probs > 0
    expected = probs[possible] * observed.sum()
    return float(((observed[possible] - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """About the 99.9 % point (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"seed": 1},
    {"seed": 1, "top_k": 3},
    {"seed": 2, "top_p": 0.8, "frequency_penalty": 0.7},
    {"seed": 3, "min_tokens": 4, "logit_bias": {EOS: 30.0}},
    {"seed": 4, "logprobs": 2},
]


def test_neighbours_in_the_batch_change_nothing() -> None:
    logits = noise(5, len(MIXED))
    sequences = [with_output(sequence_of([1, 2], **kind), [3, 3]) for kind in MIXED]

    together = sample(logits, *sequences)

    alone = [sample(logits[i : i + 1], sequences[i])[0] for i in range(len(MIXED))]
    backwards = sample(logits.flip(0), *sequences[::-1])[::-1]
    assert together == alone == backwards


def test_choices_drawn_together_are_those_drawn_apart() -> None:
    parent = sequence_of([1, 2], seed=9, n=4)
    logits = noise(7)

    together = sample(logits.unsqueeze(0), parent, num_samples=4)[0]

    apart = [sample(logits.unsqueeze(0), parent.fork(i))[0][0] for i in range(4)]
    assert together == apart


def test_choices_differ_where_they_are_sampled_and_agree_where_they_are_greedy() -> None:
    sampled = sample(noise(1).unsqueeze(0), sequence_of([1], seed=1), num_samples=20)[0]
    greedy = sample(noise(1).unsqueeze(0), sequence_of([1], temperature=0.0), num_samples=20)[0]

    assert len({token.token_id for token in sampled}) > 3
    assert {token.token_id for token in greedy} == {int(noise(1).argmax())}


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6, 1e-5, 1e-3])
def test_the_lowest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    logits = 50 * noise(2)

    assert token_of(logits, sequence_of([1], temperature=temperature)) == int(logits.argmax())


def test_one_token_is_left_by_a_tiny_top_p_and_by_top_k_one() -> None:
    logits = noise(2)

    for sampling in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        for seed in range(10):
            sequence = sequence_of([1], seed=seed, **sampling)
            assert token_of(logits, sequence) == int(logits.argmax())


def test_penalties_are_those_of_their_definitions() -> None:
    logits = noise(4)
    sequence = with_output(
        sequence_of([1, 2], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25),
        [3, 3, 4],
    )
    expected = logits.clone()
    for token in (1, 2, 3, 4):
        expected[token] = logits[token] / 2 if logits[token] > 0 else logits[token] * 2
    expected[3] -= 2 * 0.5 + 0.25
    expected[4] -= 0.5 + 0.25

    penalised = logits.clone()
    apply_penalties(
        penalised, sequence.sampling, sequence.prompt_token_ids, sequence.output_token_ids
    )

    torch.testing.assert_close(penalised, expected)


def test_the_prompt_is_no_output_to_the_frequency_and_presence_penalties() -> None:
    logits = noise(4)
    sequence = sequence_of([1, 2, 2], frequency_penalty=2.0, presence_penalty=2.0)

    penalised = logits.clone()
    apply_penalties(
        penalised, sequence.sampling, sequence.prompt_token_ids, sequence.output_token_ids
    )

    torch.testing.assert_close(penalised, logits)


@pytest.mark.parametrize("penalty", [1e-320, 1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_extreme_penalty_leaves_a_token_to_choose(penalty: float, temperature: float) -> None:
    sequence = with_output(
        sequence_of([1], repetition_penalty=penalty, temperature=temperature, seed=0), [2, 3]
    )

    tokens = [token_of(noise(seed), sequence) for seed in range(20)]

    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    assert len(set(tokens)) > 1


def test_a_bias_decides_for_or_against_a_token() -> None:
    logits = noise(6)
    likeliest = int(logits.argmax())

    wanted = token_of(logits, sequence_of([1], temperature=0.0, logit_bias={5: 100.0}))
    unwanted = token_of(logits, sequence_of([1], temperature=0.0, logit_bias={likeliest: -100.0}))

    assert wanted == 5
    assert unwanted == int(logits.argsort(descending=True)[1])


def test_no_token_ends_the_answer_before_its_minimum_length() -> None:
    logits = noise(6)
    logits[[EOS, 3]] = 50.0
    sequence = sequence_of([1], min_tokens=2, stop_token_ids=(3,), temperature=0.0)

    early = token_of(logits, sequence)
    late = token_of(logits, with_output(sequence, [1, 1]))

    assert early not in {EOS, 3}
    assert late in {EOS, 3}


def test_a_minimum_length_with_nothing_that_ends_is_no_fault() -> None:
    logits = noise(6)
    sequence = sequence_of([1], min_tokens=5, ignore_eos=True, temperature=0.0)

    assert token_of(logits, sequence) == int(logits.argmax())


def logprobs_of(logits: Tensor, sequence: Sequence) -> Logprobs:
    found = sample(logits.unsqueeze(0), sequence)[0][0].logprobs
    assert found is not None
    return found


def test_logprobs_are_the_models_own_whatever_was_done_to_sample() -> None:
    logits = noise(8)
    plain = torch.log_softmax(logits, dim=-1)
    sequence = sequence_of(
        [1], temperature=0.3, top_k=2, logit_bias={7: 100.0}, presence_penalty=1.0, logprobs=3
    )

    found = logprobs_of(logits, sequence)

    assert found.token_id == 7
    assert found.logprob == pytest.approx(float(plain[7]), abs=1e-6)
    assert found.rank == int((plain > plain[7]).sum()) + 1
    assert [token for token, _ in found.top] == plain.argsort(descending=True)[:3].tolist()


def test_zero_logprobs_tell_of_the_chosen_token_only() -> None:
    assert logprobs_of(noise(8), sequence_of([1], logprobs=0)).top == ()


def test_no_logprobs_are_worked_out_where_none_are_asked_for() -> None:
    assert sample(noise(8).unsqueeze(0), sequence_of([1]))[0][0].logprobs is None


def test_logprobs_are_finite_where_most_tokens_are_impossible() -> None:
    logits = noise(8)
    logits[3:] = float("-inf")

    found = logprobs_of(logits, sequence_of([1], temperature=0.0, logprobs=20))

    assert all(math.isfinite(logprob) for logprob in (found.logprob, *(lp for _, lp in found.top)))


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["plain", "processed"])
def test_a_row_that_is_not_finite_fails_alone(
    value: float, temperature: float, penalty: float
) -> None:
    kind = {"temperature": temperature, "seed": 4, "repetition_penalty": penalty}
    logits = noise(5, 3)
    sequences = [sequence_of([1, 2], **kind) for _ in range(3)]
    expected = sample(logits, *sequences)
    logits[1] = value

    result = Sampler().sample(logits, rows_of(*sequences))

    assert set(result.failed) == {sequences[1].seq_id}
    assert [result.samples[s.seq_id][0] for s in sequences[::2]] == [expected[0], expected[2]]


def test_a_mask_leaves_the_tokens_that_it_allows() -> None:
    logits = noise(6)
    (row,) = rows_of(sequence_of([1], temperature=0.0))
    allowed = np.zeros(VOCAB_SIZE, bool)
    allowed[[4, 9]] = True
    masks = np.packbits(allowed, bitorder="little")[None]

    result = Sampler().sample(logits.unsqueeze(0), [replace(row, masks=masks)])

    best = 4 if logits[4] > logits[9] else 9
    assert result.samples[row.seq_id] == [[SampledToken(best)]]


def test_a_mask_that_allows_nothing_fails_its_row() -> None:
    (row,) = rows_of(sequence_of([1]))
    masks = np.zeros((1, -(-VOCAB_SIZE // 8)), np.uint8)

    result = Sampler().sample(noise(6).unsqueeze(0), [replace(row, masks=masks)])

    assert set(result.failed) == {row.seq_id}


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    found = logprobs_of(noise(8)[:5], sequence_of([1], temperature=0.0, logprobs=20))

    assert len(found.top) == 5


def test_prompt_logprobs_are_those_of_the_tokens_that_are_there() -> None:
    logits = noise(9, 3)
    sequence = sequence_of([4, 5, 6, 7], prompt_logprobs=1)

    result = Sampler().sample(logits, rows_of(sequence, num_samples=0))

    plain = torch.log_softmax(logits, dim=-1)
    positions = result.prompt_logprobs[sequence.seq_id]
    for row, position in enumerate((1, 2, 3)):
        found = positions[position]
        assert found.token_id == position + 4
        assert found.logprob == pytest.approx(float(plain[row, position + 4]), abs=1e-6)
        assert found.top[0][0] == int(plain[row].argmax())
    assert result.samples == {}


def test_no_rows_give_no_samples() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB_SIZE), []).samples == {}


def test_half_precision_logits_are_sampled_in_full_precision() -> None:
    logits = noise(3).bfloat16()

    for seed in range(5):
        sequence = sequence_of([1], seed=seed, top_p=0.9)
        assert token_of(logits, sequence) == token_of(logits.float(), sequence)

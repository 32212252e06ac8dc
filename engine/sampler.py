"""Sampler: logits into tokens, the same for a sequence whatever runs beside it.

A sequence's randomness is a number computed from (seed, choice, position), not the state of a
generator: so batching, preemption and restarts cannot change what is drawn.
"""

import hashlib
import struct
from collections import Counter

import torch
from torch import Tensor

from loraplex.engine.input_batch import LogitsRow
from loraplex.engine.protocol import PositionLogprobs, TokenLogprob
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduler import ModelRunnerOutput, SampledToken
from loraplex.engine.sequence import Sequence
from loraplex.engine.stopping import StopChecker
from loraplex.engine.token_text import TokenText

_LARGEST = 1e30
_LEAST_LOGPROB = -9999.0
_NUCLEUS_GUESS = 1024  # most likely tokens looked at before all of them are sorted


class Sampler:
    def __init__(self, stops: StopChecker, token_text: TokenText) -> None:
        self._stops = stops
        self._token_text = token_text

    def sample(self, logits: Tensor, rows: list[LogitsRow]) -> ModelRunnerOutput:
        """Chooses tokens and reads logprobs.

        Args:
            logits: [R, V], any float dtype; the model's own.
            rows: what each of the R rows is for.
        """
        result = ModelRunnerOutput()
        greedy = logits.max(dim=-1).indices.tolist() if rows else []
        for index, row in enumerate(rows):
            if row.prompt_position >= 0:
                self._prompt_logprobs(logits[index], row, result)
                continue
            params = row.sequence.sampling
            plain = params.is_greedy and not _changes_logits(row.sequence)
            tokens = (
                [greedy[index]] * row.num_samples
                if plain
                else self._choose(logits[index].float(), row)
            )
            result.samples[row.sequence.seq_id] = [
                SampledToken(token, self._logprobs(logits[index], token, params.logprobs))
                for token in tokens
            ]
        return result

    def _choose(self, logits: Tensor, row: LogitsRow) -> list[int]:
        """logits [V] float32 -> one token for each sample."""
        sequence = row.sequence
        logits = self._process(logits, sequence)
        if sequence.sampling.is_greedy:
            return [int(logits.argmax())] * row.num_samples
        tokens, probs = candidates(logits, sequence.sampling)
        cumulative = probs.double().cumsum(0)
        points = [
            uniform(sequence.seed, sequence.index + choice, sequence.num_output_tokens)
            for choice in range(row.num_samples)
        ]
        at = torch.tensor(points, dtype=torch.double, device=logits.device) * cumulative[-1]
        indices = torch.searchsorted(cumulative, at, right=True).clamp_max(len(probs) - 1)
        return [int(token) for token in (indices if tokens is None else tokens[indices])]

    def _process(self, logits: Tensor, sequence: Sequence) -> Tensor:
        """Bias, minimum length and penalties; logits [V] float32 -> [V]."""
        params = sequence.sampling
        logits = logits.clone()
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[tokens] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if params.has_penalties:
            apply_penalties(logits, sequence)
            logits.clamp_(-_LARGEST, _LARGEST)  # an extreme penalty must not make infinities meet
        if sequence.num_output_tokens < params.min_tokens:
            logits[sorted(self._stops.ending_token_ids(sequence))] = float("-inf")
        return logits

    def _prompt_logprobs(self, logits: Tensor, row: LogitsRow, result: ModelRunnerOutput) -> None:
        sequence = row.sequence
        token = sequence.token_ids[row.prompt_position]
        logprobs = self._logprobs(logits, token, sequence.sampling.prompt_logprobs)
        if logprobs is not None:
            positions = result.prompt_logprobs.setdefault(sequence.seq_id, {})
            positions[row.prompt_position] = logprobs

    def _logprobs(self, logits: Tensor, token: int, num_top: int | None) -> PositionLogprobs | None:
        """Of the model's own distribution. logits [V]."""
        if num_top is None:
            return None
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        rank = int((logprobs > logprobs[token]).sum()) + 1
        chosen = self._entry(token, float(logprobs[token]), rank)
        values, tokens = torch.topk(logprobs, min(num_top, len(logprobs)))
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return PositionLogprobs(
            chosen, [self._entry(t, v, i + 1) for i, (t, v) in enumerate(pairs)]
        )

    def _entry(self, token: int, logprob: float, rank: int) -> TokenLogprob:
        text, raw = self._token_text.describe(token)
        finite = logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB  # -inf and NaN are no JSON
        return TokenLogprob(token, finite, text, raw, rank)


def _changes_logits(sequence: Sequence) -> bool:
    params = sequence.sampling
    early = sequence.num_output_tokens < params.min_tokens
    return bool(params.logit_bias) or params.has_penalties or early


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its three arguments only."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def apply_penalties(logits: Tensor, sequence: Sequence) -> None:
    """Repetition penalty as in CTRL (arXiv 1909.05858), the others as OpenAI defines them.

    logits [V] float32, changed in place.
    """
    params = sequence.sampling
    device = logits.device
    seen = torch.tensor(sorted(set(sequence.token_ids)), device=device)
    if params.repetition_penalty != 1.0:
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.num_output_tokens:
        counts = Counter(sequence.output_token_ids)
        tokens = torch.tensor(list(counts), device=device)
        amounts = torch.tensor(list(counts.values()), device=device)
        logits[tokens] -= params.frequency_penalty * amounts + params.presence_penalty


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """The tokens that may be drawn, and their probabilities (not normalised).

    Temperature, then top-k, then top-p over what is left, then min-p.

    Args:
        logits: [V] float32.

    Returns:
        (tokens [C] or None for all in order, probabilities [C] float32).
    """
    logits = (logits - logits.max()) / params.temperature  # the smallest temperature stays finite
    top_k = params.top_k if 0 < params.top_k < len(logits) else None
    if top_k is None and params.top_p == 1.0:
        probs = torch.softmax(logits, dim=-1)
        return None, _drop_unlikely(probs, params.min_p)
    if top_k is not None:
        values, tokens = torch.topk(logits, top_k)
        probs = torch.softmax(values, dim=-1)
    else:
        tokens, probs = _likeliest(torch.softmax(logits, dim=-1), params.top_p)
    outside = probs.cumsum(0) - probs >= params.top_p
    return tokens, _drop_unlikely(probs.masked_fill(outside, 0.0), params.min_p)


def _drop_unlikely(probs: Tensor, min_p: float) -> Tensor:
    return probs if min_p == 0.0 else probs.masked_fill(probs < min_p * probs.max(), 0.0)


def _likeliest(probs: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Tokens and probabilities in falling order, at least as many as hold the mass."""
    values, tokens = torch.topk(probs, min(_NUCLEUS_GUESS, len(probs)))
    if float(values.sum()) < mass and len(tokens) < len(probs):
        values, tokens = torch.sort(probs, descending=True)
    return tokens, values

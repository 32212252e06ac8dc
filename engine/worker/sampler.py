"""Sampler: turns logits into tokens, for each sequence independently of all others.

A sequence's randomness is a number computed from (seed, choice, position), not the state of a
generator: batching, preemption, drafts and restarts cannot change what is drawn.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.errors import INTERNAL_ERROR
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.step import (
    LogitsRows,
    Logprobs,
    PromptRow,
    RowSampling,
    SampledToken,
    StepOutput,
)
from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.draw.keys import draw_key
from loraplex.kernels.draw.settings import DrawSettings
from loraplex.kernels.kernel_set import Kernels

_LARGEST = 1e30
_LEAST_LOGPROB = -9999.0
NOT_FINITE = "The model's output for this request is not finite."

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Row:
    """One row of logits to choose from."""

    index: int  # among the step's rows
    of: RowSampling
    num_before: int  # drafts that are taken for output

    @property
    def params(self) -> SamplingParams:
        return self.of.params

    @property
    def position(self) -> int:
        return self.of.position + self.num_before

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return self.of.output_token_ids + self.of.drafts[: self.num_before]

    @property
    def is_too_early_to_end(self) -> bool:
        return self.position < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        params = self.params
        is_changed = bool(params.logit_bias) or params.has_penalties or self.of.masks is not None
        return is_changed or self.is_too_early_to_end


class Sampler:
    def __init__(self, kernels: Kernels = NAIVE) -> None:
        self._kernels = kernels

    def sample(self, logits: Tensor, rows: Sequence[LogitsRows]) -> StepOutput:
        """Chooses tokens and reads log-probabilities.

        A row from which no token can be chosen, or whose own values raise an error, fails its
        sequence and no other.

        Args:
            logits: [R, V], any float dtype; the model's own.
            rows: what the R rows are for, one after another.
        """
        result = StepOutput()
        groups: list[list[_Row]] = []  # by sequence that wants tokens
        first = 0
        for row in rows:
            if isinstance(row, PromptRow):
                with _failing_alone(row.seq_id, result, logits.device):
                    found = _logprobs(logits[first], row.token_id, row.num_top)
                    result.prompt_logprobs.setdefault(row.seq_id, {})[row.position] = found
            else:
                groups.append([_Row(first + i, row, i) for i in range(row.num_rows)])
            first += row.num_rows
        rows_to_choose = [row for group in groups for row in group]
        try:
            chosen = self._choose_all(logits, rows_to_choose)
        except Exception as error:
            _raise_if_of_device(error, logits.device)
            chosen = self._choose_one_by_one(logits, rows_to_choose, result)
        for group in groups:
            seq_id = group[0].of.seq_id
            if group[0].index in chosen:
                with _failing_alone(seq_id, result, logits.device):
                    result.samples[seq_id] = _samples(logits, group, chosen)
            else:
                result.failed.setdefault(seq_id, NOT_FINITE)
        return result

    def _choose_one_by_one(
        self, logits: Tensor, rows: list[_Row], result: StepOutput
    ) -> dict[int, list[int]]:
        """Returns the same tokens as `_choose_all`, except for the rows that raise an error."""
        chosen: dict[int, list[int]] = {}
        for row in rows:
            with _failing_alone(row.of.seq_id, result, logits.device):
                chosen |= self._choose_all(logits, [row])
        return chosen

    def _choose_all(self, logits: Tensor, rows: list[_Row]) -> dict[int, list[int]]:
        """Returns, by row index, a token for each of the row's choices; none where none is
        possible."""
        chosen = self._choose(logits, {row.index: row for row in rows if not row.changes_logits})
        changed = [row for row in rows if row.changes_logits]
        if changed:
            processed = torch.stack([_process(logits[row.index], row) for row in changed])
            places = self._choose(processed, dict(enumerate(changed)))
            found = {changed[place].index: tokens for place, tokens in places.items()}
            # Penalties bound what they change, and so hide what is not finite.
            raw = [float(logits[index, tokens[0]]) for index, tokens in found.items()]
            chosen |= {
                index: tokens
                for value, (index, tokens) in zip(raw, found.items(), strict=True)
                if math.isfinite(value)
            }
        return chosen

    def _choose(self, logits: Tensor, rows: dict[int, _Row]) -> dict[int, list[int]]:
        """Chooses tokens from logits [V] for each pair of a row and what it needs; returns them as
        `_choose_all`."""
        chosen: dict[int, list[int]] = {}
        greedy = {i: row for i, row in rows.items() if row.params.is_greedy}
        if greedy:
            best = self._kernels.argmax(logits)
            values = logits.gather(1, best.unsqueeze(1)).squeeze(1)
            tokens, values = torch.stack((best.double(), values.double())).tolist()
            chosen |= {
                i: [int(tokens[i])] * row.of.num_choices
                for i, row in greedy.items()
                if math.isfinite(values[i])
            }
        drawn = {i: row for i, row in rows.items() if i not in greedy}
        if drawn:
            chosen |= self._draw(logits, drawn)
        return chosen

    def _draw(self, logits: Tensor, rows: dict[int, _Row]) -> dict[int, list[int]]:
        draws = [
            (index, row, row.of.first_choice + choice)
            for index, row in rows.items()
            for choice in range(row.of.num_choices)
        ]
        device = logits.device
        indices = torch.tensor([index for index, _, _ in draws], device=device)
        drawn = self._kernels.draw(
            logits,
            indices,
            draw_settings([row.params for _, row, _ in draws], device),
            torch.tensor(
                [draw_key(row.of.seed, choice, row.position) for _, row, choice in draws],
                device=device,
            ),
        )
        tokens, values = torch.stack((drawn.double(), logits[indices, drawn].double())).tolist()
        chosen: dict[int, list[int]] = {}
        for (index, _, _), token, value in zip(draws, tokens, values, strict=True):
            if math.isfinite(value):
                chosen.setdefault(index, []).append(int(token))
        return chosen


@contextmanager
def _failing_alone(seq_id: int, result: StepOutput, device: torch.device) -> Iterator[None]:
    """Fails one sequence where the block raises an error, unless the device is at fault."""
    try:
        yield
    except Exception as error:
        _raise_if_of_device(error, device)
        logger.exception("Sampling for sequence %d failed", seq_id)
        result.failed[seq_id] = INTERNAL_ERROR


def _raise_if_of_device(error: Exception, device: torch.device) -> None:
    """Raises what may have left a GPU unusable: then no row of the step can be trusted."""
    if device.type != "cpu" and isinstance(error, RuntimeError):
        raise error


def _samples(
    logits: Tensor, group: list[_Row], chosen: dict[int, list[int]]
) -> list[list[SampledToken]]:
    """Returns, for each choice of one sequence, its next tokens: as far as the drafts were
    right."""
    first, drafts = group[0], group[0].of.drafts
    if not drafts:
        return [[_sampled(logits, first, token)] for token in chosen[first.index]]
    tokens = []
    for row in group:
        if row.index not in chosen:
            break
        token = chosen[row.index][0]
        tokens.append(_sampled(logits, row, token))
        if row.num_before == len(drafts) or token != drafts[row.num_before]:
            break
    return [tokens]


def _sampled(logits: Tensor, row: _Row, token: int) -> SampledToken:
    num_top = row.params.logprobs
    return SampledToken(
        token, None if num_top is None else _logprobs(logits[row.index], token, num_top)
    )


def _process(logits: Tensor, row: _Row) -> Tensor:
    """Applies bias, penalties, minimum length and mask; logits [V] -> [V] float32, a copy."""
    params = row.params
    logits = logits.to(torch.float32, copy=True)
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[tokens] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.has_penalties:
        apply_penalties(logits, params, row.of.prompt_token_ids, row.output_token_ids)
        logits.clamp_(-_LARGEST, _LARGEST)  # an extreme penalty must not make infinities meet
    if row.is_too_early_to_end:
        logits[sorted(row.of.ending_token_ids)] = float("-inf")
    if row.of.masks is not None:
        bits = np.unpackbits(row.of.masks[row.num_before], bitorder="little", count=len(logits))
        logits[torch.from_numpy(bits == 0).to(logits.device)] = float("-inf")
    return logits


def _logprobs(logits: Tensor, token: int, num_top: int) -> Logprobs:
    """Returns log-probabilities of the model's own distribution. logits [V]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    above = (logprobs > logprobs[token]).sum()
    values, tokens = torch.topk(logprobs, min(num_top, len(logprobs)))
    numbers = (logprobs[token, None], above[None], values, tokens)
    own, num_above, *top = torch.cat([part.double() for part in numbers]).tolist()  # at one go
    count = len(values)
    return Logprobs(
        token,
        _finite(own),
        int(num_above) + 1,
        tuple((int(t), _finite(v)) for v, t in zip(top[:count], top[count:], strict=True)),
    )


def _finite(logprob: float) -> float:
    """Replaces -inf and NaN, which JSON cannot express."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def apply_penalties(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> None:
    """Repetition penalty as in CTRL (arXiv 1909.05858), the others as OpenAI defines them.

    Args:
        logits: [V] float32, changed in place.
        prompt: token ids, which only the repetition penalty counts.
        output: token ids so far.
    """
    device = logits.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), device=device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output:
        counts = Counter(output)
        tokens = torch.tensor(list(counts), device=device)
        amounts = torch.tensor(list(counts.values()), device=device)
        logits[tokens] -= params.frequency_penalty * amounts + params.presence_penalty


def draw_settings(params: list[SamplingParams], device: torch.device) -> DrawSettings:
    """Returns the settings of one draw for each of these."""
    return DrawSettings(
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([max(p.top_k, 0) for p in params], device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        has_cuts=any(p.top_k > 0 or p.top_p < 1.0 for p in params),
    )

"""Sampler: logits into tokens, the same for a sequence whatever runs beside it.

A sequence's randomness is a number computed from (seed, choice, position), not the state of a
generator: so batching, preemption and restarts cannot change what is drawn.
"""

import hashlib
import struct
from collections import Counter

import torch
from torch import Tensor

from loraplex.engine.protocol import PositionLogprobs, TokenLogprob
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.scheduler import ModelRunnerOutput, SampledToken
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.sequence import Sequence
from loraplex.engine.text.token_text import TokenText
from loraplex.engine.worker.flat_step import LogitsRow
from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.draw.settings import DrawSettings
from loraplex.kernels.kernel_set import Kernels

_LARGEST = 1e30
_LEAST_LOGPROB = -9999.0


class Sampler:
    def __init__(self, stops: StopChecker, token_text: TokenText, kernels: Kernels = NAIVE) -> None:
        self._stops = stops
        self._token_text = token_text
        self._kernels = kernels

    def sample(self, logits: Tensor, rows: list[LogitsRow]) -> ModelRunnerOutput:
        """Chooses tokens and reads logprobs.

        Args:
            logits: [R, V], any float dtype; the model's own.
            rows: what each of the R rows is for.
        """
        result = ModelRunnerOutput()
        chosen = self._choose_all(logits, rows)
        for index, row in enumerate(rows):
            if row.prompt_position >= 0:
                self._prompt_logprobs(logits[index], row, result)
                continue
            num_logprobs = row.sequence.sampling.logprobs
            result.samples[row.sequence.seq_id] = [
                SampledToken(token, self._logprobs(logits[index], token, num_logprobs))
                for token in chosen[index]
            ]
        return result

    def _choose_all(self, logits: Tensor, rows: list[LogitsRow]) -> dict[int, list[int]]:
        """-> by index of the row, a token for each of its samples."""
        sampled = {i: row for i, row in enumerate(rows) if row.prompt_position < 0}
        changed = [i for i, row in sampled.items() if _changes_logits(row.sequence)]
        plain = sampled.keys() - changed
        chosen = self._choose(logits, {i: sampled[i] for i in sorted(plain)})
        if changed:
            processed = [self._process(logits[i], rows[i].sequence) for i in changed]
            found = self._choose(torch.stack(processed), dict(enumerate(rows[i] for i in changed)))
            chosen |= {changed[index]: tokens for index, tokens in found.items()}
        return chosen

    def _choose(self, logits: Tensor, rows: dict[int, LogitsRow]) -> dict[int, list[int]]:
        """logits [R, V] and what wants a token from which row -> by row, one for each sample."""
        chosen: dict[int, list[int]] = {}
        greedy = {i: row for i, row in rows.items() if row.sequence.sampling.is_greedy}
        if greedy:
            best = self._kernels.argmax(logits).tolist()
            chosen |= {i: [best[i]] * row.num_samples for i, row in greedy.items()}
        drawn = {i: row for i, row in rows.items() if i not in greedy}
        if drawn:
            chosen |= self._draw(logits, drawn)
        return chosen

    def _draw(self, logits: Tensor, rows: dict[int, LogitsRow]) -> dict[int, list[int]]:
        draws = [
            (index, row.sequence, choice)
            for index, row in rows.items()
            for choice in range(row.num_samples)
        ]
        device = logits.device
        tokens = self._kernels.draw(
            logits,
            torch.tensor([index for index, _, _ in draws], device=device),
            draw_settings([sequence.sampling for _, sequence, _ in draws], device),
            torch.tensor(
                [uniform(s.seed, s.index + choice, s.num_output_tokens) for _, s, choice in draws],
                dtype=torch.double,
                device=device,
            ),
        ).tolist()
        chosen: dict[int, list[int]] = {index: [] for index in rows}
        for (index, _, _), token in zip(draws, tokens, strict=True):
            chosen[index].append(token)
        return chosen

    def _process(self, logits: Tensor, sequence: Sequence) -> Tensor:
        """Bias, minimum length and penalties; logits [V] -> [V] float32, a copy."""
        params = sequence.sampling
        logits = logits.to(torch.float32, copy=True)
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
        above = (logprobs > logprobs[token]).sum()
        values, tokens = torch.topk(logprobs, min(num_top, len(logprobs)))
        numbers = (logprobs[token, None], above[None], values, tokens)
        own, rank, *top = torch.cat([part.double() for part in numbers]).tolist()  # at one go
        pairs = zip(top[len(values) :], top, strict=False)
        return PositionLogprobs(
            self._entry(token, own, int(rank) + 1),
            [self._entry(int(t), v, i + 1) for i, (t, v) in enumerate(pairs)],
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


def draw_settings(params: list[SamplingParams], device: torch.device) -> DrawSettings:
    """Of one draw for each of these."""
    return DrawSettings(
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([max(p.top_k, 0) for p in params], device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
    )

"""Runs steps on a GPU that no request asked for, before its memory is given to the KV cache.

They compile what prompts need, so that no request waits for it, and allocate what steps allocate,
so that it is known how much of the memory must stay free.
"""

from dataclasses import dataclass

import numpy as np
import torch

from loraplex.engine.model.loader import LoadedModel
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.scheduler import SchedulerLimits
from loraplex.engine.step import BASE_SLOT, NOWHERE, FlatStep, LogitsRows, PromptRow, RowSampling
from loraplex.engine.worker.forward import Forward
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.sampler import Sampler

_SHORT = 32  # tokens: more than a tile takes at most, and so few that their keys are split
_GREEDY = SamplingParams(temperature=0.0, logprobs=5)
# All that a row's logits may go through at once.
_SAMPLED = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5
)


@torch.inference_mode()
def rehearse(
    forward: Forward,
    sampler: Sampler,
    loaded: LoadedModel,
    limits: SchedulerLimits,
    num_groups: int,
    block_size: int,
) -> None:
    """Runs steps of few tokens and of as many as possible, without a context and behind a long one,
    with an adapter and without.

    Nothing is written into the cache, of which only the first block is read.
    """
    longest, most = loaded.max_model_len, limits.max_num_batched_tokens
    short = min(_SHORT, most, longest)
    num_rows = max(limits.max_num_seqs, limits.max_logits_rows)
    for slot in (BASE_SLOT, 0):
        for num_tokens, context in ((1, 1), (1, longest), (short, longest), (most, 1)):
            layout = StepLayout(num_groups, block_size, longest)
            step = layout.step(num_tokens, context, num_rows, slot)
            logits = forward(InputBatch.of(step, forward.device, forward.lora_capacity))
            for params in (_GREEDY, _SAMPLED):
                sampler.sample(logits, _rows(len(logits), limits.max_num_seqs, params))


def _rows(num_rows: int, num_sequences: int, params: SamplingParams) -> list[LogitsRows]:
    """Returns so many rows that sample tokens, and prompt log-probabilities for the others."""
    ends = min(num_rows, num_sequences)
    prompts: list[LogitsRows] = [PromptRow(-1, i, 0, 5) for i in range(min(1, num_rows - ends))]
    return [*prompts, *(RowSampling(i, params, 0, 0, prompt_token_ids=(0,)) for i in range(ends))]


@dataclass(frozen=True)
class StepLayout:
    num_groups: int  # of layers
    block_size: int
    max_model_len: int

    def step(self, num_tokens: int, context: int, num_rows: int, slot: int) -> FlatStep:
        """Returns a step of tokens in the null block, in sequences as long as possible.

        Args:
            context: tokens of each sequence at least, those of the step included.
            num_rows: rows of logits that are wanted at most, of the last tokens.
            slot: the adapter's, of all tokens.
        """
        starts = np.arange(0, num_tokens, self.max_model_len)
        query_start = np.append(starts, num_tokens).astype(np.int64)
        counts = np.diff(query_start)
        seq_lens = np.maximum(counts, context)
        before = np.repeat(seq_lens - counts - query_start[:-1], counts)
        width = -(-int(seq_lens.max()) // self.block_size)
        return FlatStep(
            token_ids=np.zeros(num_tokens, np.int64),
            positions=np.arange(num_tokens) + before,
            slot_mapping=np.full((self.num_groups, num_tokens), NOWHERE, np.int64),
            adapter_slots=np.full(num_tokens, slot, np.int32),
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=np.zeros((self.num_groups, len(counts), width), np.int64),
            logits_indices=np.arange(max(0, num_tokens - num_rows), num_tokens),
        )

"""The values that pass between scheduler and workers: a step and its result.

Torch-free and without references to either side, so that a step can be sent to another process.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.manifest import AdapterLoad
from loraplex.engine.sampling_params import SamplingParams

NOWHERE = -1  # the slot of a token whose keys and values are not written
BASE_SLOT = -1  # the adapter slot of a token that no adapter acts on


@dataclass(frozen=True)
class BlockCopy:
    """A KV block that is copied to another one before the step writes."""

    source: int
    target: int


@dataclass(frozen=True)
class BlockMoves:
    """Blocks that one step moves: first out, then in, before anything else is read or written."""

    offloads: tuple[tuple[int, int], ...] = ()  # (block id, host slot)
    fetches: tuple[tuple[int, int], ...] = ()  # (host slot, block id)


NO_MOVES = BlockMoves()


@dataclass(frozen=True, eq=False)
class FlatStep:
    """A step of S sequences, T new tokens and R rows of logits, over G groups of layers."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [G, T] where keys and values go; NOWHERE: they are there
    adapter_slots: NDArray[np.int32]  # [T]; BASE_SLOT for the base model
    query_start: NDArray[np.int64]  # [S + 1] the first token of each sequence, and T
    seq_lens: NDArray[np.int64]  # [S] tokens, the new ones included
    block_tables: NDArray[np.int64]  # [G, S, B]
    logits_indices: NDArray[np.int64]  # [R] below T

    @classmethod
    def empty(cls, num_groups: int) -> "FlatStep":
        """Returns a step of no sequences."""
        none = np.empty(0, np.int64)
        return cls(
            token_ids=none,
            positions=none,
            slot_mapping=np.empty((num_groups, 0), np.int64),
            adapter_slots=np.empty(0, np.int32),
            query_start=np.zeros(1, np.int64),
            seq_lens=none,
            block_tables=np.empty((num_groups, 0, 0), np.int64),
            logits_indices=none,
        )

    @property
    def has_adapter(self) -> bool:
        return bool((self.adapter_slots != BASE_SLOT).any())


@dataclass(frozen=True)
class PromptRow:
    """One row of logits that gives the log-probability of a prompt token."""

    seq_id: int
    position: int  # of that token in the prompt
    token_id: int
    num_top: int  # likeliest tokens to report beside it

    @property
    def num_rows(self) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class RowSampling:
    """1 + k rows of logits of one sequence, from which its next tokens are chosen.

    Row i is treated as if the first i of the k drafts were output. Its token is the sequence's next
    one if the rows before it have chosen exactly those drafts.
    """

    seq_id: int
    params: SamplingParams
    seed: int
    position: int  # among the output tokens, of the first token to choose
    first_choice: int = 0  # the index of the first choice
    num_choices: int = 1  # that are drawn from the one row; drafts only where it is 1
    prompt_token_ids: tuple[int, ...] = ()  # where penalties need them
    output_token_ids: tuple[int, ...] = ()  # likewise
    ending_token_ids: frozenset[int] = frozenset()  # not to be chosen before `min_tokens`
    drafts: tuple[int, ...] = ()  # [k] token ids, which lie in the step behind the last token
    masks: NDArray[np.uint8] | None = None  # [1 + k, ceil(V / 8)] allowed tokens, low bits first

    @property
    def num_rows(self) -> int:
        return 1 + len(self.drafts)


LogitsRows = PromptRow | RowSampling


@dataclass(frozen=True, eq=False)
class StepInput:
    """Everything a worker needs for one step; the parts are applied in the order of the fields."""

    adapter_loads: tuple[AdapterLoad, ...]
    moves: BlockMoves  # of blocks between tiers
    copies: tuple[BlockCopy, ...]  # before anything is written
    seq_ids: tuple[int, ...]  # [S]; of none: nothing is computed
    tokens: FlatStep
    rows: tuple[LogitsRows, ...]  # of the R rows of logits, in their order


@dataclass(frozen=True)
class Logprobs:
    """The log-probability of one token, and those of the likeliest ones, at one position."""

    token_id: int
    logprob: float  # finite
    rank: int  # 1 for the likeliest
    top: tuple[tuple[int, float], ...]  # (token id, logprob), the likeliest first


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class StepOutput:
    """The results of a step's rows, by sequence id."""

    samples: dict[int, list[list[SampledToken]]] = field(default_factory=dict)
    # per choice, its next tokens: one, and one more for each accepted draft
    prompt_logprobs: dict[int, dict[int, Logprobs]] = field(default_factory=dict)
    # by position in the prompt
    failed: dict[int, str] = field(default_factory=dict)  # why nothing could be chosen

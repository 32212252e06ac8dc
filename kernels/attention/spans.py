"""QuerySpans: assigns the rows of a flat batch to sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QuerySpans:
    """Sequence s has the query rows `query_start[s]:query_start[s + 1]` of a flat batch; they are
    the last of its `seq_lens[s]` cached tokens.

    The two tensors lie on the model's device and may be refreshed in place. The bounds are all that
    the host knows: where a launch is recorded and replayed, they must hold at every replay.
    """

    query_start: Tensor  # [S + 1] int64, row offsets
    seq_lens: Tensor  # [S] int64, this step's tokens included; 0: padding, whose rows become zeros
    max_query_len: int  # no sequence has more rows
    max_seq_len: int  # nor more tokens

    @classmethod
    def of(
        cls,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Self:
        """Builds spans from numbers on the host: S + 1 row offsets and S lengths."""
        lengths = [end - start for start, end in pairwise(query_start)]
        return cls(
            torch.tensor(query_start, dtype=torch.int64, device=device),
            torch.tensor(seq_lens, dtype=torch.int64, device=device),
            max(lengths, default=0),
            max(seq_lens, default=0),
        )

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]

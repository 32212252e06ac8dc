"""Paged attention in plain torch: the oracle that faster implementations are tested against."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.attention.spans import QuerySpans

PART = 256  # keys that are summed by themselves
TILE = 16  # query tokens of one product
_LOG2E = 1.4426950408889634


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    spans: QuerySpans,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends each query token to its sequence's cached keys, itself included.

    Prefill, chunked prefill and decode are one case: the query rows of a sequence are the last of
    its cached tokens.

    Args:
        query: [T, H, Dk], any float dtype.
        key_cache: [N, KVH, BS, Dk], keys by block; H is a multiple of KVH.
        value_cache: [N, KVH, BS, Dv].
        block_tables: [S, B] integer; entries behind the window are never read.
        spans: the rows and the length of each of the S sequences.
        scaling: multiplies the scores.
        window: a query sees at most this many keys, itself included.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H] extra logits that take weight and give no value.

    Returns:
        [T, H, Dv] in the dtype of `query`; computed in float32. On a CPU a row's bits do not
        depend on how many rows of its sequence there are: keys are cut at multiples of `PART` from
        the first one on, and all products are of one size, with zeros where there is nothing.
    """
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    query_start, seq_lens = spans.query_start.tolist(), spans.seq_lens.tolist()
    for s, seq_len in enumerate(seq_lens):
        rows = slice(query_start[s], query_start[s + 1])
        if rows.stop == rows.start or seq_len == 0:
            out[rows] = 0
            continue
        attend = _Sequence(key_cache, value_cache, block_tables[s], seq_len, window)
        out[rows] = attend(query[rows], scaling, softcap, sinks)
    return out


@dataclass(frozen=True)
class _Sums:
    """What the rows of n tiles got from some keys; weights are powers of two."""

    peak: Tensor  # [n, KVH, G * TILE, 1] the highest score
    total: Tensor  # [n, KVH, G * TILE, 1] the sum of weights, of which the peak's is 1
    mixed: Tensor  # [n, KVH, G * TILE, Dv] weighted values

    def plus(self, other: "_Sums") -> "_Sums":
        peak = torch.maximum(self.peak, other.peak)
        ours, theirs = _weights(self.peak, peak), _weights(other.peak, peak)
        return _Sums(
            peak,
            self.total * ours + other.total * theirs,
            self.mixed * ours + other.mixed * theirs,
        )


@dataclass(frozen=True)
class _Sequence:
    """The keys and values of one sequence, and what its last tokens see of them."""

    key_cache: Tensor
    value_cache: Tensor
    table: Tensor  # [B]
    seq_len: int
    window: int | None

    def __call__(
        self, query: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """query [Q, H, Dk] of the last Q tokens -> [Q, H, Dv] float32."""
        num_queries, num_heads, _ = query.shape
        first = self.seq_len - num_queries
        oldest = 0 if self.window is None else max(0, first - self.window + 1)
        tiles = self._tiles(query)
        sums = None
        for begin in range(oldest // PART * PART, self.seq_len, PART):
            part = self._part(tiles, begin, oldest, first, scaling, softcap)
            sums = part if sums is None else sums.plus(part)
        assert sums is not None
        if sinks is not None:
            heads = sinks.float().view(tiles.shape[1], -1, 1).expand(-1, -1, TILE)
            peak = heads.reshape(1, tiles.shape[1], -1, 1).expand_as(sums.peak) * _LOG2E
            nothing = torch.zeros_like(sums.mixed)
            sums = sums.plus(_Sums(peak, torch.ones_like(peak), nothing))
        out = sums.mixed / sums.total
        by_token = out.view(*out.shape[:2], -1, TILE, out.shape[-1]).permute(0, 3, 1, 2, 4)
        return by_token.reshape(-1, num_heads, out.shape[-1])[:num_queries]

    def _tiles(self, query: Tensor) -> Tensor:
        """[Q, H, Dk] -> [n, KVH, G * TILE, Dk] float32, zeros behind the last query."""
        _, num_heads, dim = query.shape
        kv_heads = self.key_cache.shape[1]
        padded = functional.pad(query.float(), (0, 0, 0, 0, 0, -len(query) % TILE))
        parts = padded.reshape(-1, TILE, kv_heads, num_heads // kv_heads, dim)
        return parts.permute(0, 2, 3, 1, 4).reshape(len(parts), kv_heads, -1, dim)

    def _part(
        self,
        tiles: Tensor,
        begin: int,
        oldest: int,
        first: int,
        scaling: float,
        softcap: float | None,
    ) -> _Sums:
        """Sums the part of the keys from `begin` on; keys before `oldest` may belong to another
        sequence by now."""
        start, end = max(begin, oldest), min(begin + PART, self.seq_len)
        room = (0, 0, start - begin, begin + PART - end)
        keys, values = (
            functional.pad(self._gather(cache, start, end), room)
            for cache in (self.key_cache, self.value_cache)
        )
        scores = torch.matmul(tiles, keys.transpose(1, 2)) * scaling  # [n, KVH, G * TILE, PART]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = ~self._visible(len(tiles), begin, end, first, scores.device)
        by_token = (scores * _LOG2E).view(*scores.shape[:2], -1, TILE, PART)
        scores = by_token.masked_fill(hidden, float("-inf")).view(scores.shape)
        peak = scores.amax(-1, keepdim=True)
        weights = _weights(scores, peak)
        return _Sums(peak, weights.sum(-1, keepdim=True), torch.matmul(weights, values))

    def _gather(self, cache: Tensor, start: int, end: int) -> Tensor:
        """-> [KVH, end - start, D] float32: tokens by their positions."""
        size = cache.shape[2]
        first = start // size
        blocks = cache.index_select(0, self.table[first : -(-end // size)])  # [B, KVH, BS, D]
        tokens = blocks.transpose(0, 1).flatten(1, 2)
        return tokens[:, start - first * size : end - first * size].float()

    def _visible(
        self, num_tiles: int, begin: int, end: int, first: int, device: torch.device
    ) -> Tensor:
        """-> [n, 1, 1, TILE, PART] bool: which key of a part each query may see."""
        queries = torch.arange(first, first + num_tiles * TILE, device=device)[:, None]
        keys = torch.arange(begin, begin + PART, device=device)[None, :]
        mask = (keys <= queries) & (keys < end)
        if self.window is not None:
            mask &= keys > queries - self.window
        return mask.view(num_tiles, 1, 1, TILE, PART)


def _weights(scores: Tensor, peak: Tensor) -> Tensor:
    """Returns 2 to the power of each score's distance below the peak; 0 where nothing is seen."""
    return torch.exp2(scores - peak.masked_fill(peak == float("-inf"), 0.0))

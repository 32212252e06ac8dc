"""LoRA for a flat batch of mixed adapters in plain torch: the oracle of the faster kernels.

For each row t with adapter s and for each slice of the output:
    out[t, slice] += scaling * B_s (A_s x[t])
The arithmetic is float32 throughout, and one rounding to the output's dtype comes last. Rows of the
base model, and of slots that are empty in the table, are not touched.
"""

from collections.abc import Iterator

from torch import Tensor

from loraplex.kernels.linear.naive import linear
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand


class LoRATable:
    """The adapters of one linear by slot, unpacked."""

    def __init__(self, num_slots: int) -> None:
        self._operands: list[LoRAOperand | None] = [None] * num_slots

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        self._operands[slot] = operand

    def segments(self, batch: LoRABatch) -> Iterator[tuple[Tensor, LoRAOperand]]:
        """Yields [n] int64 rows and the weights of each adapter that has both rows and weights."""
        starts = batch.starts.tolist()
        for slot, start, end in zip(batch.slots.tolist(), starts, starts[1:], strict=False):
            operand = self._operands[slot] if slot >= 0 else None
            if operand is not None and start < end:
                yield batch.rows[start:end], operand


def add_lora(out: Tensor, x: Tensor, table: LoRATable, batch: LoRABatch) -> None:
    """Adds each adapter's delta of a linear to its rows, in place.

    Args:
        out: [T, width] the base linear's output, any float dtype.
        x: [T, in] its input; a view with any strides.
        table: the weights by slot, of any ranks.
        batch: the slot of each of the T rows.
    """
    for rows, operand in table.segments(batch):
        hidden = linear(x.index_select(0, rows).float(), operand.a.float())  # [n, ranks]
        _expand(out, rows, hidden, operand)


def add_embedding_lora(
    out: Tensor, token_ids: Tensor, table: LoRATable, batch: LoRABatch, embed_scale: float
) -> None:
    """Adds each adapter's delta of an embedding to its rows, in place.

    Args:
        out: [T, width] the base embedding's output, any float dtype.
        token_ids: [T] integers below the vocabulary of A.
        table: the weights by slot; here A is [ranks, vocabulary].
        batch: the slot of each of the T rows.
        embed_scale: what the base embedding multiplies its rows by.
    """
    for rows, operand in table.segments(batch):
        hidden = operand.a.index_select(1, token_ids.index_select(0, rows)).t().float()
        _expand(out, rows, hidden * embed_scale, operand)


def _expand(out: Tensor, rows: Tensor, hidden: Tensor, operand: LoRAOperand) -> None:
    first = 0
    for start, b, scaling in operand.slices:
        width, rank = b.shape
        delta = linear(hidden[:, first : first + rank] * scaling, b.float())  # [n, width]
        columns = out[:, start : start + width]
        columns[rows] = (columns[rows].float() + delta).to(out.dtype)
        first += rank

"""LoRATable: where a layer's adapters lie on the device, as the Triton kernels read it."""

import torch
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.lora.operands import LoRAOperand

MAX_SLICES = 4  # adapted members of one fused linear
MAX_RANKS = 256 * MAX_SLICES  # of all its slices together
HEADER = 3  # an entry begins: address of A or 0 where the slot is empty, ranks, number of slices
FIELDS = 4  # then for each slice: first column, width, rank, address of B
ENTRY = HEADER + FIELDS * MAX_SLICES
ALIGNMENT = 16  # numbers, to which rows of B keep the place that their column has in the output


class LoRATable:
    """The adapters of one linear by slot: addresses, ranks and columns, in tensors that stay.

    Every adapter has its own tensors of its own ranks, so that nothing is padded to a rank and
    nothing moves when another comes or goes (ADR 8).

    Attributes:
        entries: [slots, ENTRY] int64.
        scalings: [slots, MAX_SLICES] float32.
        dtype: of all weights.
    """

    def __init__(self, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.entries = torch.zeros(num_slots, ENTRY, dtype=torch.int64, device=device)
        self.scalings = torch.zeros(num_slots, MAX_SLICES, dtype=torch.float32, device=device)
        self.dtype = dtype
        self._weights: list[tuple[Tensor, ...]] = [()] * num_slots  # what the entries point at

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        """Puts an adapter's weights into a slot, or None to empty it.

        Raises:
            ValueError: more slices or ranks than an entry has room for.
        """
        entry, scalings = [0] * ENTRY, [0.0] * MAX_SLICES
        weights: tuple[Tensor, ...] = ()
        if operand is not None:
            if len(operand.slices) > MAX_SLICES or operand.a.shape[0] > MAX_RANKS:
                raise ValueError(
                    f"{len(operand.slices)} slices of {operand.a.shape[0]} ranks do not fit into "
                    f"an entry for {MAX_SLICES} slices of {MAX_RANKS} ranks"
                )
            a = self._way_down(operand.a.to(self.entries.device, self.dtype))
            entry[:HEADER] = a.data_ptr(), operand.a.shape[0], len(operand.slices)
            weights = (a,)
            for index, (start, b, scaling) in enumerate(operand.slices):
                packed = self._way_up(b.to(self.entries.device, self.dtype), start)
                first = HEADER + FIELDS * index
                entry[first : first + FIELDS] = start, *b.shape, packed.data_ptr()
                scalings[index] = scaling
                weights = (*weights, packed)
        self.entries[slot].copy_(torch.tensor(entry))
        self.scalings[slot].copy_(torch.tensor(scalings))
        self._weights[slot] = weights

    @staticmethod
    def _way_down(a: Tensor) -> Tensor:
        """[ranks, in], as it is read: along the inputs."""
        return _aligned(a)

    @staticmethod
    def _way_up(b: Tensor, start: int) -> Tensor:
        """[width, rank] -> [rank, columns], the columns those of the output from the last multiple
        of ALIGNMENT at or before `start` up to the next one, with zeros beside the slice."""
        before = start % ALIGNMENT
        after = -(before + b.shape[0]) % ALIGNMENT
        return _aligned(functional.pad(b.t(), (before, after)))


class EmbeddingLoRATable(LoRATable):
    """The adapters of one embedding by slot, with A read along the ranks of one token."""

    @staticmethod
    def _way_down(a: Tensor) -> Tensor:
        """[ranks, vocabulary] -> [vocabulary, ranks]"""
        return _aligned(a.t())


def _aligned(weights: Tensor) -> Tensor:
    """Contiguous, and from an address on from which 16 bytes are loaded at once."""
    weights = weights.contiguous()
    return weights if weights.data_ptr() % 16 == 0 else weights.clone()

"""LoRATable: where a layer's adapters lie on the device, as the Triton kernels read it."""

import struct

import torch
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.lora.operands import LoRAOperand

MAX_SLICES = 4  # adapted members of one fused linear
MAX_RANKS = 256 * MAX_SLICES  # of all its slices together
HEADER = 3  # an entry begins: address of A, ranks, number of slices; all 0 where it is empty
FIELDS = 5  # then for each slice: first column, width, rank, address of B, scaling's bits
ENTRY = HEADER + FIELDS * MAX_SLICES
ALIGNMENT = 16  # numbers, to which rows of B keep the place that their column has in the output


class LoRATable:
    """The adapters of one linear by slot: addresses, ranks and columns, in tensors that stay.

    Every adapter has its own tensors of its own ranks, so that nothing is padded to a rank and
    nothing moves when another comes or goes (ADR 8).

    Attributes:
        entries: [slots, ENTRY] int64.
        dtype: of all weights.
    """

    def __init__(self, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.entries = torch.zeros(num_slots, ENTRY, dtype=torch.int64, device=device)
        self.dtype = dtype
        self._weights: list[list[Tensor]] = [[]] * num_slots  # what the entries point at

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        """Puts an adapter's weights into a slot, or None to empty it.

        Raises:
            ValueError: more slices or ranks than an entry has room for.
        """
        entry, weights = self._describe(operand) if operand is not None else ([], [])
        numbers = torch.tensor(entry + [0] * (ENTRY - len(entry)))
        self.entries[slot].copy_(numbers, non_blocking=True)
        self._weights[slot] = weights

    def _describe(self, operand: LoRAOperand) -> tuple[list[int], list[Tensor]]:
        """-> an adapter's entry, and its weights as the kernels read them."""
        if len(operand.slices) > MAX_SLICES or operand.a.shape[0] > MAX_RANKS:
            raise ValueError(
                f"{len(operand.slices)} slices of {operand.a.shape[0]} ranks do not fit into "
                f"an entry for {MAX_SLICES} slices of {MAX_RANKS} ranks"
            )
        a = self._shrink_operand(operand.a.to(self.entries.device, self.dtype))
        entry, weights = [a.data_ptr(), operand.a.shape[0], len(operand.slices)], [a]
        for start, b, scaling in operand.slices:
            weights.append(self._expand_operand(b.to(self.entries.device, self.dtype), start))
            bits = int.from_bytes(struct.pack("<f", scaling), "little", signed=True)
            entry += (start, *b.shape, weights[-1].data_ptr(), bits)
        return entry, weights

    @staticmethod
    def _shrink_operand(a: Tensor) -> Tensor:
        """[ranks, in], as it is read: along the inputs."""
        return _aligned(a)

    @staticmethod
    def _expand_operand(b: Tensor, start: int) -> Tensor:
        """[width, rank] -> [rank, columns], the columns those of the output from the last multiple
        of ALIGNMENT at or before `start` up to the next one, with zeros beside the slice."""
        before = start % ALIGNMENT
        after = -(before + b.shape[0]) % ALIGNMENT
        return _aligned(functional.pad(b.t(), (before, after)))


class EmbeddingLoRATable(LoRATable):
    """The adapters of one embedding by slot, with A read along the ranks of one token."""

    @staticmethod
    def _shrink_operand(a: Tensor) -> Tensor:
        """[ranks, vocabulary] -> [vocabulary, ranks]"""
        return _aligned(a.t())


def _aligned(weights: Tensor) -> Tensor:
    """Contiguous, and from an address on from which 16 bytes are loaded at once."""
    weights = weights.contiguous()
    return weights if weights.data_ptr() % 16 == 0 else weights.clone()

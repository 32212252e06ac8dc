"""The layers that replace a model's own: the base layer plus the delta of each row's adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.kernel_set import Kernels
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRATable


@dataclass
class LoRAContext:
    """What the layers of one model read at each forward; set by the model runner before it."""

    hidden: LoRABatch | None = None  # for the rows of the hidden states; None: all base
    logits: LoRABatch | None = None  # for the rows that reach lm_head; None: all base


class LoRALayer(nn.Module):
    """Holds the weights of each slot's adapter for one place of the model.

    Args:
        batch: gives the batch of the running forward, or None where it is all base.
        table: the weights by slot, as `kernels` read them.
        kernels: what computes the deltas.
    """

    def __init__(
        self, batch: Callable[[], LoRABatch | None], table: LoRATable, kernels: Kernels
    ) -> None:
        super().__init__()
        self._batch = batch
        self._kernels = kernels
        self._table = table

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        """Puts an adapter's weights into a slot, or None to empty it."""
        self._table.set(slot, operand)

    def batch_of(self, num_rows: int) -> LoRABatch | None:
        """Returns the slots of the running forward's rows.

        Raises:
            RuntimeError: the layer is fed another number of rows than the batch has.
        """
        batch = self._batch()
        if batch is not None and batch.num_rows != num_rows:
            raise RuntimeError(f"a layer got {num_rows} rows in a batch of {batch.num_rows}")
        return batch

    def add_delta(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' deltas to `out` [..., width] in place; `x` [..., in] is its input."""
        rows = out.view(-1, out.shape[-1])
        batch = self.batch_of(rows.shape[0])
        if batch is not None:
            self._kernels.add_lora(rows, x.reshape(-1, x.shape[-1]), self._table, batch)
        return out


class LoRALinear(LoRALayer):
    """A linear of any kind (also lm_head, or one that the model fused itself) with LoRA."""

    def __init__(
        self,
        base: nn.Module,
        batch: Callable[[], LoRABatch | None],
        num_slots: int,
        kernels: Kernels = NAIVE,
    ) -> None:
        super().__init__(batch, kernels.lora_table(num_slots), kernels)
        self.base = base

    @property
    def weight(self) -> Any:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return self.add_delta(self.base(x), x)


class LoRAEmbedding(LoRALayer):
    """An input embedding with LoRA, scaled as the base embedding scales its own rows."""

    def __init__(
        self,
        base: nn.Embedding,
        batch: Callable[[], LoRABatch | None],
        num_slots: int,
        kernels: Kernels = NAIVE,
    ) -> None:
        super().__init__(batch, kernels.embedding_lora_table(num_slots), kernels)
        self.base = base
        self._embed_scale = float(getattr(base, "embed_scale", 1.0))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] integers -> [..., hidden]"""
        out: torch.Tensor = self.base(token_ids)
        rows = out.view(-1, out.shape[-1])
        batch = self.batch_of(rows.shape[0])
        if batch is not None:
            self._kernels.add_embedding_lora(
                rows, token_ids.reshape(-1), self._table, batch, self._embed_scale
            )
        return out


class FusedLinear(LoRALayer):
    """Linears that share an input, as one GEMM and one LoRA; `FusedMember`s return the slices."""

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        batch: Callable[[], LoRABatch | None],
        num_slots: int,
        kernels: Kernels = NAIVE,
    ) -> None:
        super().__init__(batch, kernels.lora_table(num_slots), kernels)
        self.base: nn.Module = _join(linears)
        self._widths = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._slices: list[torch.Tensor | None] = [None] * len(linears)

    @property
    def weight(self) -> Any:
        """[sum of outs, in]"""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., sum of outs]"""
        return self.add_delta(self.base(x), x)

    def slice(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Returns one member's output [..., out] for an input [..., in].

        The members are called with the very same tensor one after another: the first call computes
        for all, and each slice is returned once, so that nothing is held after the last.
        """
        if x is not self._input or self._slices[index] is None:
            self._slices = list(torch.split(self(x), self._widths, dim=-1))
        mine, self._slices[index] = self._slices[index], None
        self._input = x if any(part is not None for part in self._slices) else None
        return cast(torch.Tensor, mine)


def _join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Joins linears into one with the outputs of all, one after another."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


class FusedMember(nn.Module):
    """Takes the place of one of the fused linears."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        # Not a sub-module: the fused linear is registered once, beside its members.
        self._slice = fused.slice
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out of this member]"""
        return self._slice(self._index, x)

"""Adapters made and run by PEFT, and a model of ours beside it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.models.architectures import load_reference

from loraplex.adapters.injection import inject_lora
from loraplex.adapters.layers import LoRAContext
from loraplex.adapters.manager import LoRAManager
from loraplex.adapters.manifest import AdapterRef
from loraplex.kernels.lora.batch import BASE_SLOT, LoRABatch

CPU = torch.device("cpu")

# What PEFT itself warns of, for `pytestmark` of a module that makes adapters.
PEFT_NOISE = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "`is_gradient_checkpointing` is deprecated",
        "Setting `save_embedding_layers` to `True`",
        "Model has `tie_word_embeddings=True`",
    )
]

Tensors = dict[str, torch.Tensor]


def write_adapter(
    base: Path,
    folder: Path,
    seed: int = 0,
    *,
    save_embedding_layers: bool | str = "auto",
    **config: Any,
) -> Path:
    """Saves a PEFT adapter for the checkpoint `base`, with random A and B."""
    model = get_peft_model(load_reference(base), LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    path = folder / "adapter_model.safetensors"
    tensors = change(load_file(path))
    path.unlink()  # the loaded tensors may be views of it
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return folder


@torch.inference_mode()
def peft_logits(
    base: Path, adapter: Path | None, ids: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[B, T, vocabulary] logits of plain transformers, or of PEFT with an adapter; ids [B, T]."""
    model = load_reference(base).to(dtype)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    return model(input_ids=ids, use_cache=False).logits


class Served:
    """A checkpoint with our LoRA layers, run by transformers' own attention on whole sequences."""

    def __init__(
        self,
        base: Path,
        store: Path,
        num_slots: int = 8,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        """`options`: those of LoRAManager."""
        self.context = LoRAContext()
        self.model = load_reference(base).to(dtype)
        self.sites = inject_lora(self.model, self.context, num_slots)
        self.manager = LoRAManager(self.sites, store, [base.name], **options)

    def register(self, folder: Path, adapter_id: str = "a", tenant: str = "t") -> AdapterRef:
        return self.manager.register(tenant, adapter_id, folder).ref

    def acquire(self, ref: AdapterRef) -> int:
        """Waits for the load, then takes a slot."""
        while not self.manager.prepare(ref):
            error = self.manager.load_error(ref)
            if error is not None:
                raise error
        slot = self.manager.acquire(ref)
        assert slot is not None
        for load in self.manager.take_loads():
            self.manager.place(load)
        return slot

    def logits(self, ids: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """[B, T, vocabulary] logits of ids [B, T]; row b uses slot `slots[b]`, -1 for the base."""
        return self.logits_by_token(ids, [slot for slot in slots for _ in range(ids.shape[1])])

    @torch.inference_mode()
    def logits_by_token(self, ids: torch.Tensor, token_slots: Sequence[int]) -> torch.Tensor:
        """[B, T, vocabulary] logits of ids [B, T]; B * T slots."""
        self.context.hidden = self.context.logits = LoRABatch.build(token_slots, CPU)
        return self.model(input_ids=ids, use_cache=False).logits

    def adapted(self, folder: Path, ids: torch.Tensor) -> torch.Tensor:
        """[B, T, vocabulary] logits with one adapter on every row."""
        slot = self.acquire(self.register(folder))
        return self.logits(ids, [slot] * ids.shape[0])

    def base(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(ids, [BASE_SLOT] * ids.shape[0])

    def close(self) -> None:
        self.manager.close()

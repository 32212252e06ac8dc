"""Compares one step of two sequences through our forward pass with plain transformers."""

import torch

from loraplex.adapters.layers import LoRAContext
from loraplex.engine.kv.storage.groups import group_layers
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.model.loader import LoadedModel
from loraplex.engine.model.probe import AttentionProbe
from loraplex.engine.model.reference import NUM_SEQUENCES, ReferenceLogits
from loraplex.engine.worker.attention import AttentionBatch, AttentionContext, install_attention
from loraplex.engine.worker.forward import Forward
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.kv_cache import KVCache, kv_format_of
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.kernel_set import Kernels


@torch.inference_mode()
def check_forward(
    loaded: LoadedModel, probe: AttentionProbe, kernels: Kernels, block_size: int
) -> None:
    """Computes the dry forward's tokens over a small KV cache of their own. Leaves the attention
    layers bound to that cache: `install_attention` comes afterwards.

    Raises:
        UnsupportedModel: what comes out is not what transformers computes.
    """
    reference = probe.reference
    assert reference is not None
    layers = list(probe.layers.values())
    groups = group_layers(layers)
    num_blocks = -(-reference.token_ids.shape[1] // block_size)  # a sequence's, per group
    tables = torch.arange(len(groups) * NUM_SEQUENCES * num_blocks, device=loaded.device)
    layout = KVLayout(groups, block_size, loaded.max_model_len, chunk=loaded.max_model_len)
    kv_format = kv_format_of(loaded.dtype)
    cache = KVCache(layers, layout, kv_format, len(tables), loaded.device, kernels)
    attention = AttentionContext()
    install_attention(probe, groups, cache, attention)
    tables = tables.reshape(len(groups), NUM_SEQUENCES, num_blocks)
    logits = Forward(loaded, attention, LoRAContext())(_batch(reference, tables, block_size))
    reference.compare(logits)


def _batch(reference: ReferenceLogits, tables: torch.Tensor, block_size: int) -> InputBatch:
    """`tables`: [G, NUM_SEQUENCES, B] int64."""
    num_sequences, length = reference.token_ids.shape
    device = tables.device
    positions = torch.arange(length, device=device)
    slots = tables[:, :, positions // block_size] * block_size + positions % block_size
    starts = list(range(0, (num_sequences + 1) * length, length))
    return InputBatch(
        token_ids=reference.token_ids.flatten(),
        positions=positions.repeat(num_sequences),
        attention=AttentionBatch(
            QuerySpans.of(starts, [length] * num_sequences, device), list(slots.flatten(1)), tables
        ),
        logits_indices=torch.tensor(reference.rows, device=device),
        hidden_lora=None,
        logits_lora=None,
    )

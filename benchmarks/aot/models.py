"""ModelShape: what decides which kernels a model launches, and the launches of one step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.kernel_set import Kernels
from loraplex.kernels.kv_cache.triton import gather_blocks, scatter_blocks
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.triton_set import triton_kernels

META = torch.device("meta")
NUM_SLOTS = 64
BLOCK_SIZE = 8
MAX_SEQ_LEN = 32 * 1024


@dataclass(frozen=True)
class ModelShape:
    """A published model's sizes."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    activation: str = "gated_silu"
    rotated: int | None = None  # numbers of a head; None: all
    window: int | None = None  # of some layers
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def rotary_dim(self) -> int:
        return self.rotated or self.head_dim


MODELS = (
    ModelShape("gemma-3-270m", 640, 4, 1, 256, 2048, 262144, "gated_gelu_tanh", window=512),
    ModelShape("gemma-3-1b", 1152, 4, 1, 256, 6912, 262144, "gated_gelu_tanh", window=512),
    ModelShape(
        "gemma-2-2b", 2304, 8, 4, 256, 9216, 256000, "gated_gelu_tanh", window=4096, softcap=50.0
    ),
    ModelShape("llama-3.2-1b", 2048, 32, 8, 64, 8192, 128256),
    ModelShape("llama-3.1-8b", 4096, 32, 8, 128, 14336, 128256),
    ModelShape("qwen2.5-0.5b", 896, 14, 2, 64, 4864, 151936),
    ModelShape("qwen3-8b", 4096, 32, 8, 128, 12288, 151936),
    ModelShape("phi-3-mini", 3072, 32, 32, 96, 8192, 32064, window=2047),
    ModelShape("phi-4-mini", 3072, 24, 8, 128, 8192, 200064, rotated=96),
    ModelShape("gpt-oss-20b", 2880, 64, 8, 64, 2880, 201088, window=128, has_sinks=True),
)


@dataclass(frozen=True)
class StepShape:
    """The sizes of one step that the host knows."""

    num_rows: int
    num_sequences: int
    longest_query: int

    @property
    def name(self) -> str:
        return str(self.num_rows)


STEPS = (  # decoding alone, and in company; a short prompt alone; chunks of prompts beside decoding
    StepShape(1, 1, 1),
    StepShape(40, 1, 40),  # too few query tiles to fill a GPU, so that each splits its keys
    StepShape(16, 16, 1),
    StepShape(1024, 1024, 1),  # so many that no sequence splits its keys, even with one KV head
    StepShape(512, 4, 512),
    StepShape(4096, 64, 2048),
)


def run_step(model: ModelShape, step: StepShape, dtype: torch.dtype) -> None:
    """Calls every operation of a model's layers, on tensors without data."""
    kernels = triton_kernels(META, dtype)
    hidden = _empty(step.num_rows, model.hidden, dtype=dtype)
    _norms(kernels, model, hidden)
    _attention(kernels, model, step, dtype)
    getattr(kernels, model.activation)(
        _empty(1, step.num_rows, 2 * model.feed_forward, dtype=dtype)
    )
    _lora(kernels, model, step, dtype)
    kernels.argmax(_empty(min(step.num_rows, 256), model.vocabulary, dtype=dtype))


def _norms(kernels: Kernels, model: ModelShape, hidden: Tensor) -> None:
    heads = _empty(1, len(hidden), model.heads, model.head_dim, dtype=hidden.dtype)
    for x in (hidden.unsqueeze(0), heads.transpose(1, 2)):
        weight = _empty(x.shape[-1], dtype=torch.float32)
        kernels.rms_norm(x, weight, 1e-6)
        kernels.rms_norm_rounding_first(x, weight, 1e-6)


def _attention(kernels: Kernels, model: ModelShape, step: StepShape, dtype: torch.dtype) -> None:
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    fused = _empty(1, step.num_rows, width, dtype=dtype)
    sizes = [model.heads * model.head_dim, *2 * [model.kv_heads * model.head_dim]]
    query, key, value = (
        part.view(1, step.num_rows, -1, model.head_dim).transpose(1, 2)
        for part in fused.split(sizes, dim=-1)
    )
    angles = _empty(1, step.num_rows, model.rotary_dim, dtype=dtype)
    query, key = kernels.rotate(query, key, angles, angles)
    storage = _empty(1000, 2, model.kv_heads, BLOCK_SIZE, model.head_dim, dtype=dtype)
    key_cache, value_cache = storage.unbind(1)
    keys, values = (part[0].transpose(0, 1) for part in (key, value))
    slots = _empty(step.num_rows, dtype=torch.int64)
    kernels.write_cache(key_cache, value_cache, keys, values, slots)
    ids = _empty(16, dtype=torch.int64)
    kernels.copy_blocks(storage, ids, ids)
    gather_blocks(storage, ids, storage[:16])
    scatter_blocks(storage, ids, storage[:16])
    spans = QuerySpans(
        _empty(step.num_sequences + 1, dtype=torch.int64),
        _empty(step.num_sequences, dtype=torch.int64),
        step.longest_query,
        MAX_SEQ_LEN,
    )
    tables = _empty(step.num_sequences, MAX_SEQ_LEN // BLOCK_SIZE, dtype=torch.int64)
    for window in {None, model.window}:
        kernels.paged_attention(
            query[0].transpose(0, 1),
            key_cache,
            value_cache,
            tables,
            spans,
            model.head_dim**-0.5,
            window=window,
            softcap=model.softcap,
            sinks=_empty(model.heads, dtype=dtype) if model.has_sinks else None,
        )


def _lora(kernels: Kernels, model: ModelShape, step: StepShape, dtype: torch.dtype) -> None:
    # A recorded step has as many segments as it has rows, any other as many as there are slots.
    capacity = min(step.num_rows, NUM_SLOTS) if step.longest_query == 1 else NUM_SLOTS
    batch = LoRABatch(
        _empty(step.num_rows, dtype=torch.int32),
        *(_empty(n, dtype=torch.int64) for n in (step.num_rows, capacity, capacity + 1)),
    )
    table = kernels.lora_table(NUM_SLOTS)
    attention = model.heads * model.head_dim
    linears = (
        (model.hidden, attention + 2 * model.kv_heads * model.head_dim),
        (attention, model.hidden),
        (model.hidden, 2 * model.feed_forward),
        (model.feed_forward, model.hidden),
        (model.hidden, model.vocabulary),
    )
    for in_features, width in linears:
        x, out = (_empty(step.num_rows, size, dtype=dtype) for size in (in_features, width))
        kernels.add_lora(out, x, table, batch)
    kernels.add_embedding_lora(
        _empty(step.num_rows, model.hidden, dtype=dtype),
        _empty(step.num_rows, dtype=torch.int64),
        kernels.embedding_lora_table(NUM_SLOTS),
        batch,
        1.0,
    )


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)

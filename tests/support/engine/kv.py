"""Sequences and KV managers without a model."""

import inspect
from collections.abc import Callable
from typing import Any

from support.models.word_tokenizer import word_tokenizer

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.keys import BlockKeyScope
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.storage.layer_state import FullAttention, SlidingWindow
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.protocol import GenerateRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.sequence import Sequence
from loraplex.engine.text.detokenizer import Detokenizer

FULL_AND_SLIDING = [
    KVGroup((0,), FullAttention()),
    KVGroup((1,), SlidingWindow(3)),
    KVGroup((2,), SlidingWindow(9)),
]
FULL = [KVGroup((0,), FullAttention())]
TOKENIZER = word_tokenizer()
MAX_MODEL_LEN = 128
SCOPE = BlockKeyScope(kv_format="float32", model_revision="1", quantization="none", numerics="1")


def adapter_ref(name: str, tenant: str = "tenant") -> AdapterRef:
    """An adapter whose content is its name."""
    return AdapterRef(tenant=tenant, adapter_id=name, digest=f"digest-{name}")


def kv_manager(
    num_blocks: int,
    block_size: int = 4,
    groups: list[KVGroup] | None = None,
    chunk: int = MAX_MODEL_LEN,
    scope: BlockKeyScope = SCOPE,
) -> KVCacheManager:
    """A manager of `num_blocks` blocks, the null block apart; `chunk`: tokens of one step."""
    layout = KVLayout(groups or FULL, block_size, MAX_MODEL_LEN, chunk)
    return KVCacheManager(BlockPool(num_blocks + 1), layout, scope)


def sequence_of(
    token_ids: list[int],
    *,
    namespace: str = "namespace",
    adapter: str | None = None,
    adapter_start: int = 0,
    frontier: int = 0,
    **sampling: Any,
) -> Sequence:
    """A sequence that has computed nothing yet; its adapter is named."""
    request = GenerateRequest(
        request_id="request",
        tenant="tenant",
        namespace=namespace,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(**sampling),
        adapter=adapter_ref(adapter) if adapter else None,
    )
    return Sequence(
        request,
        Detokenizer(TOKENIZER, token_ids),
        seed=request.sampling.seed or 0,
        max_len=MAX_MODEL_LEN,
        adapter_start=adapter_start,
        frontier=frontier,
    )


def admit(kv: KVCacheManager, sequence: Sequence) -> int:
    """Opens the sequence's table on whatever is cached; returns how many tokens that is."""
    plan = kv.plan(sequence)
    kv.commit(plan, 0)
    return plan.cached.num_tokens


def compute(kv: KVCacheManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Takes the next tokens, or all that are left, as computed."""
    count = sequence.num_uncomputed_tokens if num_tokens is None else num_tokens
    assert kv.allocate_slots(sequence, count)
    sequence.num_computed_tokens += count
    kv.index_computed(sequence)


def run_through(kv: KVCacheManager, sequence: Sequence) -> int:
    """Admits, computes and frees a sequence; returns how many of its tokens were cached."""
    num_cached = admit(kv, sequence)
    compute(kv, sequence)
    kv.free(sequence)
    return num_cached


def calls_from_outside(kv: KVCacheManager) -> list[str]:
    """A list that from now on takes the name of each method that somebody else calls."""
    names: list[str] = []
    depth = 0

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal depth
            if depth == 0:
                names.append(name)
            depth += 1
            try:
                return method(*args)
            finally:
                depth -= 1

        return call

    for name, member in inspect.getmembers(kv, inspect.ismethod):
        setattr(kv, name, noting(name, member))
    return names

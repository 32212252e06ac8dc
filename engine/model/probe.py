"""AttentionProbe: finds out what a model's attention layers store, and whether we compute it."""

import inspect
import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.kv.storage.groups import KVLayer
from loraplex.engine.kv.storage.layer_state import attention_state
from loraplex.engine.model.masks import MaskProbe
from loraplex.engine.model.reference import ReferenceLogits, dry_forward

ATTENTION = "loraplex_paged"  # our name in transformers' registry
HOOK = "loraplex_attention"  # attribute of an attention module: its PagedAttention

_PROBE = "loraplex_probe"  # in both of transformers' registries, so that masks are made as well
_OBEYED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
_WITHOUT_EFFECT = frozenset({"position_ids", "logits_to_keep", "use_cache", "is_causal"})


class AttentionProbe:
    """Records what each layer would store, during one dry forward with plain attention."""

    def __init__(self, masks: MaskProbe) -> None:
        self.layers: dict[int, KVLayer] = {}
        self.modules: dict[int, nn.Module] = {}
        self.reference: ReferenceLogits | None = None  # once the forward has run
        self._masks = masks

    def record(
        self,
        module: nn.Module,
        heads: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """`heads`: query, key and value, each [batch, heads, tokens, width].

        Raises:
            UnsupportedModel: this is not attention as we compute it.
        """
        query, key, value = heads
        index = int(getattr(module, "layer_idx"))  # noqa: B009 - transformers' modules are untyped
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise UnsupportedModel(f"layer {index} attends in both directions; decoders only")
        if index in self.layers:
            raise UnsupportedModel(f"layer {index} calls attention more than once")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModel(f"layer {index} attends to more than its own tokens")
        unknown = sorted(
            name
            for name, value in options.items()
            if name not in _OBEYED | _WITHOUT_EFFECT and (isinstance(value, Tensor) or value)
        )
        if unknown:
            raise UnsupportedModel(f"layer {index} calls attention with {', '.join(unknown)}")
        window = self._masks.window(mask, options.get("sliding_window"))
        self.modules[index] = module
        state = attention_state(window)
        self.layers[index] = KVLayer(index, key.shape[1], key.shape[-1], value.shape[-1], state)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    hook = getattr(module, HOOK, None)
    if hook is None:
        raise UnsupportedModel("it has attention outside of its numbered layers")
    if isinstance(hook, AttentionProbe):
        hook.record(module, (query, key, value), attention_mask, options)
        return _plain_attention(module, (query, key, value), attention_mask, options), None
    scaling = options.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return hook(query, key, value, scaling, options), None


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionInterface.register(_PROBE, _attention_forward)


def _plain_attention(
    module: nn.Module,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Computes attention as the module's own file does: [batch, tokens, heads, width]."""
    query, _, value = heads
    if query.is_meta:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModel("it has no plain attention to be compared with")
    out: Tensor = eager(module, *heads, mask, **options)[0]
    return out


def probe_layers(model: PreTrainedModel, max_model_len: int) -> AttentionProbe:
    """Finds out what each attention layer stores, by one dry forward of a few tokens.

    Raises:
        UnsupportedModel: a layer does not go through the attention interface, or asks for what
            our attention does not compute.
    """
    try:
        return _probe(model, max_model_len)
    except UnsupportedModel as refusal:
        message = f"{model.config.model_type} is not supported: {refusal.message}"
        raise UnsupportedModel(message) from refusal


def _probe(model: PreTrainedModel, max_model_len: int) -> AttentionProbe:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel("its forward pass takes no position_ids")
    masks = MaskProbe(max_model_len)
    AttentionMaskInterface.register(_PROBE, masks)
    probe = AttentionProbe(masks)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, HOOK, probe)
    # Without numbers in them, as `loraplex capacity` makes models, masks tell nothing.
    model.set_attn_implementation(ATTENTION if model.device.type == "meta" else _PROBE)
    probe.reference = dry_forward(model, max_model_len)
    model.set_attn_implementation(ATTENTION)
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    if sorted(probe.layers) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{len(probe.layers)} of {num_layers} layers use attention; state-space and "
            "linear-attention layers are not served"
        )
    return probe

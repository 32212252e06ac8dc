"""A KV format names its numbers and their places, and knows what they cost."""

from loraplex.engine.kv.storage.format import KVFormat
from loraplex.engine.kv.storage.groups import KVLayer
from loraplex.engine.kv.storage.layer_state import FullAttention

LAYER = KVLayer(0, num_kv_heads=2, key_dim=8, value_dim=4, state=FullAttention())


def test_a_token_costs_its_keys_and_values_in_every_head() -> None:
    assert KVFormat("bfloat16", 2).num_bytes(LAYER, 3) == 3 * 2 * (8 + 4) * 2


def test_formats_of_other_numbers_have_another_identity() -> None:
    assert KVFormat("bfloat16", 2).identity != KVFormat("float16", 2).identity

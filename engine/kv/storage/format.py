"""KVFormat: the layout of keys and values in a block."""

from dataclasses import dataclass

from loraplex.engine.kv.storage.groups import KVLayer

LAYOUT = "heads first, 1"  # to be raised with every change of where a number lies in a block


@dataclass(frozen=True)
class KVFormat:
    """One format for all layers of an engine, whose one pool has equal blocks.

    A layer's part of a block is [heads, block size, key dim] keys followed by [heads, block size,
    value dim] values. No number has a scale.
    """

    number: str  # as torch calls it: `bfloat16`
    number_bytes: int

    @property
    def identity(self) -> str:
        """Identifies the format: blocks of two formats are interchangeable only where this is
        equal."""
        return f"{self.number}/{self.number}/no scales/{LAYOUT}"

    def key_numbers(self, layer: KVLayer, num_tokens: int) -> int:
        """Returns how many numbers the keys of so many tokens take."""
        return layer.num_kv_heads * layer.key_dim * num_tokens

    def numbers(self, layer: KVLayer, num_tokens: int) -> int:
        """Returns how many numbers the keys and values of so many tokens take."""
        return layer.num_kv_heads * (layer.key_dim + layer.value_dim) * num_tokens

    def num_bytes(self, layer: KVLayer, num_tokens: int) -> int:
        """Returns how many bytes the keys and values of so many tokens take."""
        return self.numbers(layer, num_tokens) * self.number_bytes

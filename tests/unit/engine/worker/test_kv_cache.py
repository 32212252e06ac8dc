"""The memory behind block ids: each layer has its own place in a block."""

import torch
from support.engine.kv import MAX_MODEL_LEN, admit, compute, kv_manager, sequence_of

from loraplex.engine.kv.storage.groups import KVLayer, group_layers
from loraplex.engine.kv.storage.layer_state import FullAttention, SlidingWindow
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.step import BlockCopy
from loraplex.engine.worker.kv_cache import KVCache, kv_format_of, numbers_per_block

LAYERS = [
    KVLayer(0, 2, 8, 8, FullAttention()),
    KVLayer(1, 1, 8, 4, SlidingWindow(16)),
    KVLayer(2, 2, 8, 8, FullAttention()),
    KVLayer(3, 1, 8, 4, SlidingWindow(16)),
]
BLOCK, NUM_BLOCKS = 4, 6
FLOAT32 = kv_format_of(torch.float32)


def make_cache() -> KVCache:
    layout = KVLayout(group_layers(LAYERS), BLOCK, MAX_MODEL_LEN, chunk=MAX_MODEL_LEN)
    return KVCache(LAYERS, layout, FLOAT32, NUM_BLOCKS, torch.device("cpu"))


def test_layers_see_their_keys_and_values_in_shape() -> None:
    keys, values = make_cache().layer(LAYERS[1])

    assert keys.shape == (NUM_BLOCKS, 1, BLOCK, 8)
    assert values.shape == (NUM_BLOCKS, 1, BLOCK, 4)


def test_a_block_takes_room_for_the_largest_layer_in_each_place() -> None:
    assert numbers_per_block(LAYERS, group_layers(LAYERS), BLOCK, FLOAT32) == [2 * 16 * BLOCK] * 2


def test_layers_of_one_group_do_not_overlap() -> None:
    cache = make_cache()
    for layer in (LAYERS[0], LAYERS[2]):
        keys, values = cache.layer(layer)
        keys.fill_(layer.index)
        values.fill_(layer.index + 10)

    found = [[float(part[3, 1, 2, 5]) for part in cache.layer(LAYERS[i])] for i in (0, 2)]

    assert found == [[0.0, 10.0], [2.0, 12.0]]


def test_a_copied_block_holds_all_layers_of_its_group() -> None:
    cache = make_cache()
    for layer in (LAYERS[0], LAYERS[2]):
        for part in cache.layer(layer):
            part.copy_(torch.randn(part.shape))

    cache.copy([BlockCopy(source=1, target=4)])

    for layer in (LAYERS[0], LAYERS[2]):
        for part in cache.layer(layer):
            assert torch.equal(part[4], part[1])
            assert not torch.equal(part[4], part[2])


def test_copy_on_write_moves_real_numbers_before_the_write() -> None:
    cache, kv = make_cache(), kv_manager(NUM_BLOCKS - 1)
    keys, _ = cache.layer(LAYERS[0])
    parent = sequence_of([1, 2])
    admit(kv, parent)
    compute(kv, parent)
    shared = int(kv.block_ids(parent)[0, 0])
    keys[shared] = 7.0
    child = parent.fork(1)
    kv.fork(parent, child)
    parent.token_ids.append(3)
    compute(kv, parent)

    cache.copy(kv.take_copies())
    own = int(kv.block_ids(parent)[0, 0])
    keys[own, :, 2] = 9.0

    assert own != shared
    assert (keys[own, :, :2] == 7.0).all()
    assert (keys[shared] == 7.0).all()

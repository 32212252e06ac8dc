"""LoRAWeights: one adapter's tensors on the host."""

import torch

from loraplex.adapters.weights import LoRAWeights, ModuleWeights


def test_a_copy_in_one_piece_holds_the_same_numbers_side_by_side() -> None:
    modules = {
        "q": ModuleWeights(torch.randn(2, 5), torch.randn(3, 2), 0.5),
        "v": ModuleWeights(torch.randn(4, 5), torch.randn(7, 4), 2.0),
    }
    weights = LoRAWeights(modules, num_bytes=4 * (16 + 48))

    copy = weights.in_one_piece(pin_memory=False)

    assert copy.num_bytes == weights.num_bytes
    assert len({m.a.untyped_storage().data_ptr() for m in copy.modules.values()}) == 1
    for name, module in modules.items():
        assert torch.equal(copy.modules[name].a, module.a)
        assert torch.equal(copy.modules[name].b, module.b)
        assert copy.modules[name].scaling == module.scaling

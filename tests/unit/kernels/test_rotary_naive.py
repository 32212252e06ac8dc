"""The naive rotary embedding against transformers' own, to the bit."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb as gemma3
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from loraplex.kernels.rotary.naive import rotate


@pytest.mark.parametrize("apply", [llama, gemma3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [2, 24, 64])
def test_turns_the_first_numbers_of_a_head_and_passes_the_rest(
    apply: object, dtype: torch.dtype, width: int
) -> None:
    assert callable(apply)
    query, key = torch.randn(1, 4, 9, 64).to(dtype), torch.randn(1, 2, 9, 64).to(dtype)
    angles = torch.randn(1, 9, width // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    want = apply(query[..., :width], key[..., :width], cos, sin)

    got = rotate(query, key, cos, sin)

    for turned, wanted, before in zip(got, want, (query, key), strict=True):
        assert torch.equal(turned, torch.cat([wanted, before[..., width:]], dim=-1))

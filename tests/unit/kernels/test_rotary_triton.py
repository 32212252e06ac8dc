"""Rotary position embeddings in Triton against the naive ones, to the bit."""

import pytest
import torch
from support.kernels.far_rows import far_apart
from support.kernels.triton_interpreter import DEVICE, INTERPRETED

from loraplex.kernels.rotary import naive
from loraplex.kernels.rotary.triton import rotate

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.device]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "rotated"),
    [(4, 1, 64, 64), (3, 3, 96, 96), (5, 2, 40, 12), (20, 9, 16, 8), (6, 5, 256, 256)],
)
def test_every_shape_of_heads(
    dtype: torch.dtype, num_tokens: int, heads: int, key_heads: int, dim: int, rotated: int
) -> None:
    query = random(1, num_tokens, heads, dim, dtype=dtype).transpose(1, 2)
    key = random(1, key_heads, num_tokens, dim, dtype=dtype)
    cos, sin = (random(1, num_tokens, rotated, dtype=dtype) for _ in range(2))

    got = rotate(query, key, cos, sin)

    for ours, theirs in zip(got, naive.rotate(query, key, cos, sin), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_heads_of_a_fused_projection_and_strided_angles_are_read_in_place() -> None:
    fused = random(1, 5, 7, 32, dtype=torch.float32).transpose(1, 2)
    query, key = fused[:, :4], fused[:, 4:6]
    cos, sin = random(1, 5, 64, dtype=torch.float32).split(32, dim=-1)

    got = rotate(query, key, cos, sin)

    for ours, theirs in zip(got, naive.rotate(query, key, cos, sin), strict=True):
        assert torch.equal(ours, theirs)


def test_what_it_gives_lies_token_by_token() -> None:
    query, key = (random(1, 2, 3, 16, dtype=torch.float32) for _ in range(2))
    cos, sin = (random(1, 3, 16, dtype=torch.float32) for _ in range(2))

    for tensor in rotate(query, key, cos, sin):
        assert tensor[0].transpose(0, 1).is_contiguous()


@pytest.mark.skipif(not INTERPRETED, reason="maps memory that it never touches")
def test_tokens_may_lie_further_apart_than_an_int32_counts() -> None:
    query, key = (torch.randn(1, 2, 3, 16, dtype=torch.float16) for _ in range(2))
    cos, sin = (torch.randn(1, 3, 16, dtype=torch.float16) for _ in range(2))
    far = [far_apart(x[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0) for x in (query, key)]
    far += [far_apart(x[0]).unsqueeze(0) for x in (cos, sin)]

    for ours, theirs in zip(rotate(*far), rotate(query, key, cos, sin), strict=True):
        assert torch.equal(ours, theirs)

"""Which attention modules rotate by our kernel, and that nothing else changes."""

from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loraplex.engine.model.rotary import replace_rotary
from loraplex.kernels.dispatch import NAIVE

DTYPES = [torch.float32, torch.bfloat16]


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        lower, upper = x.chunk(2, dim=-1)
        return (x * cos) + (torch.cat((-upper, lower), dim=-1) * sin)

    return turn(q), turn(k)


def decorated(forward: Any) -> Any:
    @wraps(forward)
    def wrapper(self: nn.Module, *args: Any, scale: float = 1.0) -> Any:
        return tuple(scale * x for x in forward(self, *args))

    return wrapper


class Attention(nn.Module):
    def forward(self, *heads: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(*heads)


class DecoratedAttention(nn.Module):
    @decorated
    def forward(self, *heads: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(*heads)


class Unrotated(nn.Module):
    def forward(self, *heads: Tensor) -> tuple[Tensor, ...]:
        return heads[:2]


class CountingKernels:
    """The naive rotation, counted."""

    def __init__(self) -> None:
        self.calls = 0
        self.kernels = replace(NAIVE, rotate=self._rotate)

    def _rotate(self, *heads: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return NAIVE.rotate(*heads)


def heads(dtype: torch.dtype, dim: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(1, 4, 5, dim), (1, 2, 5, dim), (1, 5, dim), (1, 5, dim)]
    q, k, cos, sin = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, cos, sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Attention, DecoratedAttention])
def test_a_rotation_of_halves_becomes_ours(kind: type[nn.Module], dtype: torch.dtype) -> None:
    module, ours = kind(), CountingKernels()
    want = module(*heads(dtype))
    replace_rotary([module], dtype, ours.kernels)

    got = module(*heads(dtype))

    assert ours.calls == 1
    assert all(map(torch.equal, got, want))


def test_a_decorator_keeps_its_effect() -> None:
    module, ours = DecoratedAttention(), CountingKernels()
    replace_rotary([module], torch.float32, ours.kernels)

    doubled, _ = module(*heads(torch.float32), scale=2.0)

    assert ours.calls == 1
    assert torch.equal(doubled, 2.0 * apply_rotary_pos_emb(*heads(torch.float32))[0])


def test_other_modules_of_the_class_rotate_as_before() -> None:
    ours = CountingKernels()
    replace_rotary([Attention()], torch.float32, ours.kernels)

    Attention()(*heads(torch.float32))

    assert ours.calls == 0


def test_heads_of_another_dtype_are_rotated_as_before() -> None:
    module, ours = Attention(), CountingKernels()
    replace_rotary([module], torch.bfloat16, ours.kernels)

    module(*heads(torch.float32))

    assert ours.calls == 0


def test_a_module_that_does_not_rotate_stays_as_it_is() -> None:
    module = Unrotated()

    replace_rotary([module], torch.float32, NAIVE)

    assert "forward" not in vars(module)


def test_a_rotation_of_neighbours_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = [torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) for x in (q, k)]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", neighbours)
    module = Attention()

    replace_rotary([module], torch.float32, NAIVE)

    assert "forward" not in vars(module)


def one_at_a_time(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + sin


def only_the_query(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary_pos_emb(q, k, cos, sin)[0]


def with_complex_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError(f"expected complex angles, got {cos.dtype}")


@pytest.mark.parametrize("rotation", [one_at_a_time, only_the_query, with_complex_angles])
def test_a_rotation_of_another_signature_stays_as_it_is(
    rotation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", rotation)
    module = Attention()

    replace_rotary([module], torch.float32, NAIVE)

    assert "forward" not in vars(module)

"""What works on each row by itself: norms, rotary embeddings, gated activations, argmax."""

from collections.abc import Callable, Iterator

import torch
from gpu.case import FLOORS, Case, Goal, Machine, Timed
from torch import Tensor

from loraplex.kernels.gated_activation import naive as naive_activation
from loraplex.kernels.gated_activation import triton as activation
from loraplex.kernels.rms_norm import naive as naive_norm
from loraplex.kernels.rms_norm import triton as norm
from loraplex.kernels.rotary import naive as naive_rotary
from loraplex.kernels.rotary import triton as rotary
from loraplex.kernels.sampling import triton as sampling

_GOAL = Goal(0.6, 1)


def rows(machine: Machine) -> Iterator[Case]:
    sizes = ((3, 40), (2, 33)) if machine.interpreted else ((64, 4096), (4096, 4096), (7, 2049))
    for dtype in FLOORS:
        for count, width in sizes:
            yield from _norms(count, width, dtype, machine)
            yield from _activations(count, width, dtype, machine)
        yield _rotary(sizes[0][0], dtype, machine)
        yield _argmax(sizes[0][0], 5000 if machine.interpreted else 128256, dtype, machine)


def _norms(count: int, width: int, dtype: torch.dtype, machine: Machine) -> Iterator[Case]:
    x = torch.randn(count, width, device=machine.device).to(dtype)
    weight = torch.randn(width, device=machine.device).to(dtype)
    for name in ("rms_norm", "rms_norm_rounding_first"):
        yield _case(
            f"{name} {count} x {width}",
            lambda module, name=name: getattr(module, name)(x, weight, 1e-6),
            (norm, naive_norm),
            2 * x.nbytes,
            machine,
            dtype,
        )


def _activations(count: int, width: int, dtype: torch.dtype, machine: Machine) -> Iterator[Case]:
    x = torch.randn(count, 2 * width, device=machine.device).to(dtype)
    for name in ("gated_silu", "gated_gelu_tanh"):
        yield _case(
            f"{name} {count} x {width}",
            lambda module, name=name: getattr(module, name)(x),
            (activation, naive_activation),
            1.5 * x.nbytes,
            machine,
            dtype,
        )


def _rotary(tokens: int, dtype: torch.dtype, machine: Machine) -> Case:
    heads, kv_heads, dim = (4, 2, 20) if machine.interpreted else (32, 8, 128)
    query, key = (
        torch.randn(1, h, tokens, dim, device=machine.device).to(dtype) for h in (heads, kv_heads)
    )
    angles = torch.randn(1, tokens, dim // 4, device=machine.device).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def run(module: object) -> Tensor:
        turned = module.rotate(query, key, cos, sin)  # type: ignore[attr-defined]
        return torch.cat(turned, dim=1)[0]

    modules = (rotary, naive_rotary)
    num_bytes = 2 * (query.nbytes + key.nbytes)
    return _case(f"rotary {tokens} tokens", run, modules, num_bytes, machine, dtype)


def _argmax(count: int, vocabulary: int, dtype: torch.dtype, machine: Machine) -> Case:
    logits = torch.randn(count, vocabulary, device=machine.device).to(dtype)
    logits[0, vocabulary // 2 :] = logits[0].max()  # ties: the first wins

    def run(argmax: Callable[[Tensor], Tensor]) -> Tensor:
        return argmax(logits).double()

    timed = None
    if not machine.interpreted:
        timed = Timed(
            lambda: sampling.argmax(logits),
            logits.nbytes,
            goal=Goal(0.6, 2),
            peers={"torch": lambda: logits.argmax(-1)},
        )
    return Case(
        f"argmax {count} x {vocabulary}, {_short(dtype)}",
        lambda: run(sampling.argmax),
        lambda: run(lambda x: x.float().argmax(-1)),
        0,
        timed,
    )


def _case(
    name: str,
    run: Callable[[object], Tensor],
    modules: tuple[object, object],
    num_bytes: float,
    machine: Machine,
    dtype: torch.dtype,
) -> Case:
    ours, naive = modules
    timed = None
    if not machine.interpreted:
        peers = {"naive": lambda: run(naive)}
        timed = Timed(lambda: run(ours), num_bytes, goal=_GOAL, peers=peers)
    return Case(
        f"{name}, {_short(dtype)}", lambda: run(ours), lambda: run(naive), FLOORS[dtype], timed
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

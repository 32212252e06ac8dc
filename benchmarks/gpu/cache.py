"""Writing to the paged cache, copying blocks, and moving them in and out."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu.case import FLOORS, Case, Goal, Machine, Timed
from torch import Tensor

from loraplex.kernels.kv_cache import naive
from loraplex.kernels.kv_cache import triton as ours


def cache(machine: Machine) -> Iterator[Case]:
    for dtype in FLOORS:
        for heads, key_dim, value_dim, block in ((2, 16, 16, 4), (1, 24, 8, 8)):
            size = (13, heads, key_dim, value_dim, block)
            yield _write(f"write, odd {key_dim}/{value_dim}", 9, size, dtype, machine)
        yield from _moves("odd", 13, (5,), 4, dtype, machine)
    if machine.interpreted:
        return
    model = (8192, 8, 128, 128, 16)
    for tokens in (64, 4096):
        yield _write("write", tokens, model, torch.bfloat16, machine)
    yield from _moves(
        "blocks of one layer", 8192, (2 * 8 * 128 * 16,), 1024, torch.bfloat16, machine
    )


def _write(
    name: str, tokens: int, size: tuple[int, ...], dtype: torch.dtype, machine: Machine
) -> Case:
    """Into random slots, every fifth token being padding."""
    blocks, heads, key_dim, value_dim, block = size
    options = {"dtype": dtype, "device": machine.device}
    rows = torch.randn(tokens, heads, key_dim + value_dim, **options)
    keys, values = rows[..., :key_dim], rows[..., key_dim:]
    slots = torch.randperm(blocks * block, device=machine.device)[:tokens]
    slots[::5] = -1
    storage = torch.full((blocks, heads * block * (key_dim + value_dim)), math.nan, **options)
    split = heads * block * key_dim

    def write(write_cache: Callable[..., None], storage: Tensor) -> Tensor:
        key_cache = storage[:, :split].view(blocks, heads, block, key_dim)
        value_cache = storage[:, split:].view(blocks, heads, block, value_dim)
        write_cache(key_cache, value_cache, keys, values, slots)
        return storage

    timed = None
    if not machine.interpreted:
        run = partial(write, ours.write_cache, storage.clone())
        timed = Timed(run, 2 * rows.nbytes, goal=Goal(0.5, 1))
    return Case(
        f"{name}, {tokens} tokens, {_short(dtype)}",
        lambda: write(ours.write_cache, storage.clone()),
        lambda: write(naive.write_cache, storage.clone()),
        0,
        timed,
    )


def _moves(
    name: str, blocks: int, shape: tuple[int, ...], count: int, dtype: torch.dtype, machine: Machine
) -> Iterator[Case]:
    storage = torch.randn(blocks, *shape, device=machine.device).to(dtype)
    ids = torch.randperm(blocks, device=machine.device)
    sources, targets = ids[:count], ids[count : 2 * count]
    fresh = torch.randn(count, *shape, device=machine.device).to(dtype)

    def copy(module: object, storage: Tensor) -> Tensor:
        module.copy_blocks(storage, sources, targets)  # type: ignore[attr-defined]
        return storage

    def gather(module: object, storage: Tensor) -> Tensor:
        out = torch.empty_like(fresh)
        module.gather_blocks(storage, sources, out)  # type: ignore[attr-defined]
        return out

    def scatter(module: object, storage: Tensor) -> Tensor:
        module.scatter_blocks(storage, sources, fresh)  # type: ignore[attr-defined]
        return storage

    for verb, move in (("copy", copy), ("gather", gather), ("scatter", scatter)):
        timed = None
        if not machine.interpreted:
            run = partial(move, ours, storage.clone())
            timed = Timed(run, 2 * fresh.nbytes, goal=Goal(0.7, 1))
        yield Case(
            f"{verb} {count} {name}, {_short(dtype)}",
            partial(_on_a_copy, move, ours, storage),
            partial(_on_a_copy, move, naive, storage),
            0,
            timed,
        )


def _on_a_copy(move: Callable[[object, Tensor], Tensor], module: object, storage: Tensor) -> Tensor:
    return move(module, storage.clone())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

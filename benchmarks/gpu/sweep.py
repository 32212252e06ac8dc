"""Sizes of tiles other than the chosen ones: how attention and LoRA are best cut on this GPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from gpu.attention import Paged, Shape, attention_bytes, attention_flops
from gpu.case import FLOORS, Case, Machine, Timed
from gpu.lora import LAYERS, Adapted, Site
from torch import Tensor

from loraplex.kernels.attention import triton as attention
from loraplex.kernels.attention.tiling import Tiling, choose_tiling
from loraplex.kernels.lora import triton as lora
from loraplex.kernels.lora import triton_tiles
from loraplex.kernels.lora.triton_tiles import LoRATiles, tiles_for

HALF = torch.bfloat16
_DECODE = tuple(product((32, 64, 128), (3, 5, 7)))  # keys, stages
_PREFILL = tuple(  # rows, keys, warps, stages
    (*tile, stages)
    for tile, stages in product(((64, 64, 4), (128, 64, 8), (128, 128, 8)), (2, 3, 5))
)
_LORA = tuple(product((512, 1024, 2048, 4096), (128, 256)))  # programs, columns


def sweep(machine: Machine) -> Iterator[Case]:
    tiny = machine.interpreted
    base = Shape((), (), heads=4, kv_heads=2, dim=16, block=4) if tiny else Shape((), ())
    count, length, prompt = (2, 40, 24) if tiny else (64, 2048, 4096)
    decode = Paged.make(
        replace(base, lengths=(length,) * count, queries=(1,) * count), machine.device
    )
    for keys, stages in _DECODE:
        tiling = replace(_chosen(decode), keys=keys, stages=stages, min_tiles=max(1, 128 // keys))
        yield _attention(f"decode {count} x {length}, {keys} keys, {stages} stages", decode, tiling)
    prefill = Paged.make(replace(base, lengths=(prompt,), queries=(prompt,)), machine.device)
    for rows, keys, warps, stages in _PREFILL:
        tiling = replace(_chosen(prefill), rows=rows, keys=keys, warps=warps, stages=stages)
        name = f"{rows} rows, {keys} keys, {warps} warps, {stages} stages"
        yield _attention(f"prefill of {prompt}, {name}", prefill, tiling)
    site = Site(64, (40, 24)) if tiny else LAYERS["8B"][2]
    rows = 3 if tiny else 64
    adapted = Adapted(site, [16] * rows, range(rows), HALF, machine.device)
    for programs, columns in _LORA:
        yield _lora(rows, programs, columns, adapted)


def _chosen(paged: Paged) -> Tiling:
    return choose_tiling(paged.query, paged.keys, paged.values, paged.spans, None)


def _attention(name: str, paged: Paged, tiling: Tiling) -> Case:
    def ends() -> Tensor:
        return paged.ends(run())

    run = partial(paged.attend, partial(attention.attend, tiling), paged.query, paged.spans)
    is_decode = max(paged.shape.queries) == 1
    return Case(
        name,
        run if is_decode else ends,
        paged.expected if is_decode else paged.expected_ends,
        FLOORS[HALF],
        Timed(run, attention_bytes(paged.shape), attention_flops(paged.shape)),
        may_not_fit=True,
    )


def _lora(rows: int, programs: int, columns: int, adapted: Adapted) -> Case:
    """One site alone, whose weights may come from the cache."""
    tiles = replace(tiles_for(rows, adapted.site.inputs, HALF), columns=columns)

    def add(out: Tensor) -> None:
        before, triton_tiles.PROGRAMS = triton_tiles.PROGRAMS, programs
        try:
            _add(tiles, out, adapted)
        finally:
            triton_tiles.PROGRAMS = before

    return Case(
        f"LoRA of {rows} adapters, {programs} programs, {columns} columns",
        lambda: adapted.added(add),
        adapted.expected,
        FLOORS[HALF],
        Timed(lambda: add(adapted.out), adapted.num_bytes),
        may_not_fit=True,
    )


def _add(tiles: LoRATiles, out: Tensor, adapted: Adapted) -> None:
    lora.add_cut(tiles, out, adapted.x, adapted.table, adapted.batch)

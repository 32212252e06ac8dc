"""Offloading: blocks leave for pinned host memory while their places are written over; and back."""

import math
import time
from collections.abc import Iterator

import torch
from gpu.case import FLOORS, Case, Fact, Machine
from torch import Tensor

from loraplex.engine.kv.tiers import Transfers
from loraplex.engine.step import BlockMoves
from loraplex.engine.worker.host_arena import HostArena
from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.engine.worker.transfers import CudaTransfers, HostTransfers
from loraplex.kernels.dispatch import choose_kernels


def offload(machine: Machine) -> Iterator[Case | Fact]:
    for dtype in FLOORS:
        yield _round_trip("odd", 13, [5, 12], 3, dtype, machine)
    if machine.interpreted:
        return
    layers = [2 * 8 * 128 * 16] * 32
    yield _round_trip("blocks of 32 layers", 300, layers, 64, torch.bfloat16, machine)
    yield _rates(600, layers, 128, torch.bfloat16, machine)


def _round_trip(
    name: str, blocks: int, widths: list[int], count: int, dtype: torch.dtype, machine: Machine
) -> Case:
    """Two steps' blocks out, one after the other without a pause, then all of them in."""
    rows = [torch.randn(blocks, width, device=machine.device).to(dtype) for width in widths]
    ids = torch.randperm(blocks).tolist()
    sources, targets = ids[: 2 * count], ids[2 * count : 4 * count]
    slots = torch.randperm(2 * count).tolist()
    out = list(zip(sources, slots, strict=True))

    def run() -> Tensor:
        device = [row.clone() for row in rows]
        transfers = _transfers(device, 2 * count, machine)
        for part in (out[:count], out[count:]):
            transfers.move(BlockMoves(offloads=tuple(part)))
            for row in device:
                row[[block for block, _ in part]] = math.nan
        transfers.finish()
        transfers.move(BlockMoves(fetches=tuple(zip(slots, targets, strict=True))))
        return torch.cat([row[targets] for row in device], dim=1)

    return Case(
        f"out and in, {name}, {str(dtype).removeprefix('torch.')}",
        run,
        lambda: torch.cat([row[sources] for row in rows], dim=1),
        0,
    )


def _rates(
    blocks: int, widths: list[int], count: int, dtype: torch.dtype, machine: Machine
) -> Fact:
    """GB/s, the host's part included: the best of five."""
    rows = [torch.randn(blocks, width, device=machine.device).to(dtype) for width in widths]
    transfers = _transfers(rows, count, machine)
    pairs = tuple((index, index) for index in range(count))
    num_bytes = count * sum(widths) * dtype.itemsize
    facts = {}
    for name, moves in (("out", BlockMoves(offloads=pairs)), ("in", BlockMoves(fetches=pairs))):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            transfers.move(moves)
            transfers.finish()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        facts[f"gb_per_s_{name}"] = round(num_bytes / min(times) / 1e9, 2)
    return Fact("offload rates", facts)


def _transfers(rows: list[Tensor], num_slots: int, machine: Machine) -> Transfers:
    dtype, on_cuda = rows[0].dtype, machine.device.type == "cuda"
    device = BlockStorage(rows, choose_kernels("auto", machine.device, dtype))
    arena = HostArena(num_slots, device.widths, dtype, pinned=on_cuda).storage
    return CudaTransfers(device, arena) if on_cuda else HostTransfers(device, arena)

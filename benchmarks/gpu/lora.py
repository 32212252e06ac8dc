"""Batched LoRA: every rank and mix against the oracle, then whole layers of real models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from gpu.case import FLOORS, Case, Goal, Machine, Timed
from torch import Tensor
from torch.nn.functional import linear

from loraplex.kernels.lora import naive
from loraplex.kernels.lora import triton as ours
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRASlice
from loraplex.kernels.lora.triton_table import EmbeddingLoRATable, LoRATable

RANKS = (1, 2, 3, 5, 8, 12, 16, 24, 33, 64, 100, 128, 256)
_COLD = 200e6  # bytes of weights to go through, so that they come from memory as in a step
_MOST_LAYERS = 32
_CANARY = 3  # rows around the output that must stay as they are


@dataclass(frozen=True)
class Site:
    """A linear, or several that share their input."""

    inputs: int
    widths: tuple[int, ...]


LAYERS = {
    "8B": (
        Site(4096, (4096, 1024, 1024)),
        Site(4096, (4096,)),
        Site(4096, (14336, 14336)),
        Site(14336, (4096,)),
    ),
    "1.5B": (
        Site(1536, (1536, 256, 256)),
        Site(1536, (1536,)),
        Site(1536, (8960, 8960)),
        Site(8960, (1536,)),
    ),
}


class Adapted:
    """One site with an adapter in each slot, for the oracle and for us, and rows to run it on."""

    def __init__(
        self,
        site: Site,
        ranks: Sequence[int],
        slots: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.site, self.ranks = site, ranks
        options = {"dtype": dtype, "device": device}
        self.x = torch.randn(len(slots), site.inputs, **options)
        self.batch = LoRABatch.build(slots, device)
        self.operands = [_operand(site, rank, options) for rank in ranks]
        self.table = LoRATable(len(ranks), device, dtype)
        for slot, operand in enumerate(self.operands):
            self.table.set(slot, operand)
        self.out = torch.zeros(len(slots), sum(site.widths), **options)

    def ours(self) -> Tensor:
        return self.added(lambda out: ours.add_lora(out, self.x, self.table, self.batch))

    def expected(self) -> Tensor:
        table = naive.LoRATable(len(self.ranks))
        for slot, operand in enumerate(self.operands):
            table.set(slot, operand)
        return self.added(lambda out: naive.add_lora(out, self.x, table, self.batch))

    def added(self, add: Callable[[Tensor], None]) -> Tensor:
        """[rows + canaries, width]: deltas on zeros; base rows and canaries are ones."""
        whole = torch.ones(len(self.x) + 2 * _CANARY, sum(self.site.widths)).to(self.out)
        middle = whole[_CANARY:-_CANARY]
        middle[(self.batch.token_slots >= 0).to(whole.device)] = 0
        add(middle)
        return whole

    def again(self) -> None:
        ours.add_lora(self.out, self.x, self.table, self.batch)

    @property
    def num_bytes(self) -> float:
        """The weights of the adapters in use, the rows of x, and `out` twice."""
        used = [self.ranks[slot] for slot in set(self.batch.token_slots.tolist()) - {-1}]
        per_rank = len(self.site.widths) * self.site.inputs + sum(self.site.widths)
        rows = self.x.numel() + 2 * self.out.numel()
        return (sum(used) * per_rank + rows) * self.x.element_size()


def _operand(site: Site, rank: int, options: dict[str, object]) -> LoRAOperand:
    a = torch.randn(rank * len(site.widths), site.inputs, **options) * site.inputs**-0.5
    starts = accumulate(site.widths[:-1], initial=0)
    return LoRAOperand(
        a,
        tuple(
            LoRASlice(start, torch.randn(width, rank, **options) * rank**-0.5, (-1) ** i * 0.5)
            for i, (start, width) in enumerate(zip(starts, site.widths, strict=True))
        ),
    )


def lora(machine: Machine) -> Iterator[Case]:
    for dtype in FLOORS:
        yield from _odd(dtype, machine)
    if not machine.interpreted:
        for model in LAYERS:
            yield from _decodes(model, machine.device)
        yield _layer("8B", (16,), [0] * 4096, Goal(1 / 1.55, 8), machine.device)
        mixed = [i // 64 for i in range(4096)]
        yield _layer("8B", (16,) * 64, mixed, Goal(1 / 1.55, 8), machine.device)


def _odd(dtype: torch.dtype, machine: Machine) -> Iterator[Case]:
    small = machine.interpreted
    site = Site(33, (17, 5)) if small else Site(2049, (1500, 700, 11))
    ranks = (1, 3, 16, 33) if small else RANKS
    adapters = range(len(ranks))
    mixes: dict[str, list[int]] = {
        "one row each": list(adapters),
        "base rows between": [-1, *(slot for adapter in adapters for slot in (adapter, -1))],
        "all rows on the last": [len(ranks) - 1] * 5,
        "many rows of few": ([0] * 20 + [2] * 3 + [-1]) * (1 if small else 50),
        "one row of one": [1],
    }
    for name, slots in mixes.items():
        adapted = Adapted(site, ranks, slots, dtype, machine.device)
        yield Case(f"{_short(dtype)}, {name}", adapted.ours, adapted.expected, FLOORS[dtype])
    yield _embedding(dtype, ranks, machine)


def _embedding(dtype: torch.dtype, ranks: Sequence[int], machine: Machine) -> Case:
    site = Site(50, (24,)) if machine.interpreted else Site(32000, (2048,))
    slots = [-1, *range(len(ranks)), 0]
    options = {"dtype": dtype, "device": machine.device}
    batch = LoRABatch.build(slots, machine.device)
    tables = (
        naive.LoRATable(len(ranks)),
        EmbeddingLoRATable(len(ranks), machine.device, dtype),
    )
    for slot, rank in enumerate(ranks):
        operand = _operand(site, rank, options)
        for table in tables:
            table.set(slot, operand)
    tokens = torch.randint(site.inputs, (len(slots),), device=machine.device)
    base = torch.zeros(len(slots), *site.widths, **options)

    def run(add: Callable[..., None], table: object) -> Tensor:
        out = base.clone()
        add(out, tokens, table, batch, 2.0)
        return out

    return Case(
        f"{_short(dtype)}, embedding",
        lambda: run(ours.add_embedding_lora, tables[1]),
        lambda: run(naive.add_embedding_lora, tables[0]),
        FLOORS[dtype],
    )


def _decodes(model: str, device: torch.device) -> Iterator[Case]:
    """64 rows, each with its adapter; one for all; and ranks that add up to the same."""
    goal = Goal(1 / 1.55, 8)
    for rank in (8, 16, 64):
        yield _layer(model, (rank,) * 64, range(64), goal, device)
    yield _layer(model, (16,) * 8, [i % 8 for i in range(64)], goal, device)
    yield _layer(model, (16,), [0] * 64, goal, device)
    yield _layer(model, (4, 8, 12, 16, 24, 32) * 10 + (16,) * 4, range(64), goal, device)
    yield _layer(model, (16,), [0], goal, device)


def _layer(
    model: str, ranks: Sequence[int], slots: Sequence[int], goal: Goal, device: torch.device
) -> Case:
    """The four sites of one layer, over as many layers as make the weights come from memory."""
    sites = LAYERS[model]
    layers = [[Adapted(site, ranks, slots, torch.bfloat16, device) for site in sites]]
    num_bytes = sum(site.num_bytes for site in layers[0])
    times = min(max(1, round(_COLD / num_bytes)), _MOST_LAYERS)
    layers += [
        [Adapted(site, ranks, slots, torch.bfloat16, device) for site in sites]
        for _ in range(times - 1)
    ]
    flat = [site for layer in layers for site in layer]
    distinct = "one adapter" if len(ranks) == 1 else f"{len(ranks)} adapters"
    kinds = sorted(set(ranks))
    span = f"{kinds[0]}" if len(kinds) == 1 else f"{kinds[0]} to {kinds[-1]}"
    return Case(
        f"{model} layer, {len(slots)} rows, {distinct}, rank {span}",
        lambda: torch.cat([site.ours() for site in layers[0]], dim=1),
        lambda: torch.cat([site.expected() for site in layers[0]], dim=1),
        FLOORS[torch.bfloat16],
        Timed(
            lambda: [site.again() for site in flat],
            num_bytes,
            _flops(layers[0]),
            times,
            goal,
            _peers(flat, ranks),
        ),
    )


def _flops(sites: list[Adapted]) -> float:
    return sum(
        2 * site.ranks[slot] * (len(site.site.widths) * site.site.inputs + sum(site.site.widths))
        for site in sites
        for slot in site.batch.token_slots.tolist()
        if slot >= 0
    )


def _peers(sites: list[Adapted], ranks: Sequence[int]) -> dict[str, Callable[[], object]]:
    """The base linears of the same layers; and torch's bmm, where no rank must be padded."""
    weights = [
        site.x.new_empty(sum(site.site.widths), site.site.inputs).normal_() for site in sites
    ]
    pairs = list(zip(sites, weights, strict=True))
    peers: dict[str, Callable[[], object]] = {
        "base linears": lambda: [linear(site.x, weight) for site, weight in pairs]
    }
    if len(set(ranks)) == 1 and len(ranks) == len(sites[0].x):
        stacked = [
            (
                site,
                torch.stack([o.a for o in site.operands]),
                [
                    torch.stack([o.slices[i].b for o in site.operands])
                    for i in range(len(site.site.widths))
                ],
            )
            for site in sites
        ]
        peers["bmm"] = lambda: [_bmm(site.x, a, b, ranks[0]) for site, a, b in stacked]
    return peers


def _bmm(x: Tensor, a: Tensor, b: list[Tensor], rank: int) -> list[Tensor]:
    hidden = torch.bmm(a, x.unsqueeze(2))  # [S, ranks, 1]
    return [
        torch.bmm(part, hidden[:, i * rank : (i + 1) * rank]).squeeze(2) for i, part in enumerate(b)
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

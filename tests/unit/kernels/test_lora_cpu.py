"""The native LoRA against the naive one on the same weights in float32."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models.lora import Segment, batch_of, cast, random_operand, run_segments, table_of
from support.threads import torch_threads

from loraplex.kernels.lora import cpu, naive
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.native.huge_pages import HugePageChunks

pytestmark = pytest.mark.usefixtures("native")

DTYPES = [torch.float32, torch.bfloat16]
RANKS = [1, 2, 3, 5, 8, 12, 16, 24, 33, 64, 100, 128, 256]
QKV = [(0, 64, 16), (64, 16, 16), (80, 16, 16)]  # slices: first column, width, rank


def assert_equals_naive(out: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment]) -> None:
    want = out.clone().float()
    wide = [(rows, cast(weights, torch.float32)) for rows, weights in segments]
    run_segments(naive, want, x.float(), wide)
    before = out.clone()

    run_segments(cpu, out, x, segments)

    touched = torch.zeros(len(out), dtype=torch.bool)
    for rows, _ in segments:
        touched[rows] = True
    assert torch.equal(out[~touched], before[~touched])
    scale = float(want.abs().max()) if want.numel() else 1.0
    unit = 2**-8 if out.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.float(), want, rtol=unit, atol=1e-5 * scale)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank(dtype: torch.dtype, rank: int) -> None:
    x, out = torch.randn(7, 63).to(dtype), torch.randn(7, 100).to(dtype)

    assert_equals_naive(out, x, [(torch.arange(5), random_operand(63, [(0, 100, rank)], dtype))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_ranks_in_one_batch(dtype: torch.dtype) -> None:
    x, out = torch.randn(40, 64).to(dtype), torch.randn(40, 80).to(dtype)
    rows = torch.randperm(40).split([3] * 13 + [1])[:13]

    assert_equals_naive(
        out,
        x,
        [
            (r, random_operand(64, [(0, 80, rank)], dtype))
            for r, rank in zip(rows, RANKS, strict=True)
        ],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [1, 63, 64, 100, 3424])
@pytest.mark.parametrize("out_features", [1, 31, 64, 100, 3424])
def test_every_width(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    x, out = torch.randn(3, in_features).to(dtype), torch.randn(3, out_features).to(dtype)

    weights = random_operand(in_features, [(0, out_features, 4)], dtype)

    assert_equals_naive(out, x, [(torch.tensor([2, 0]), weights)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unequal_slices_gaps_and_base_rows(dtype: torch.dtype) -> None:
    x, out = torch.randn(200, 48).to(dtype), torch.randn(200, 96).to(dtype)
    rows = torch.randperm(200)
    segments = [
        (rows[:9], random_operand(48, [(0, 64, 4), (64, 16, 64), (80, 16, 1)], dtype)),
        (rows[9:10], random_operand(48, [(64, 16, 16)], dtype)),
        (rows[10:10], random_operand(48, QKV, dtype)),
        (rows[10:131], random_operand(48, [(0, 64, 7), (80, 16, 3)], dtype)),
    ]

    assert_equals_naive(out, x, segments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 47, 48, 49, 200])
def test_any_number_of_rows(dtype: torch.dtype, num_rows: int) -> None:
    x, out = torch.randn(num_rows, 32).to(dtype), torch.randn(num_rows, 96).to(dtype)

    assert_equals_naive(out, x, [(torch.arange(num_rows), random_operand(32, QKV, dtype))])


def test_an_empty_slot_changes_nothing() -> None:
    out, table = torch.randn(3, 8), cpu.LoRATable(2, torch.float32)
    table.set(0, random_operand(8, [(0, 8, 4)]))
    table.set(0, None)
    before = out.clone()
    batch = LoRABatch.build([0, 1, 0])
    assert batch is not None

    cpu.add_lora(out, torch.randn(3, 8), table, batch)

    assert torch.equal(out, before)


def test_unused_segments_of_a_batch_with_room_are_skipped() -> None:
    x, out, tight = torch.randn(3, 8), torch.zeros(3, 8), torch.zeros(3, 8)
    table = table_of(cpu.LoRATable, [random_operand(8, [(0, 8, 4)]) for _ in range(2)])
    roomy = LoRABatch.build([1, -1, 1], capacity=5)
    exact = LoRABatch.build([1, -1, 1])
    assert roomy is not None
    assert exact is not None

    cpu.add_lora(out, x, table, roomy)
    cpu.add_lora(tight, x, table, exact)

    assert torch.equal(out, tight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_with_strides_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    x, whole = torch.randn(64, 10).to(dtype).t(), torch.randn(10, 50).to(dtype)
    edges = whole[:, :5].clone(), whole[:, 25:].clone()

    assert_equals_naive(
        whole[:, 5:25], x, [(torch.arange(3, 9), random_operand(64, [(0, 20, 4)], dtype))]
    )
    assert torch.equal(whole[:, :5], edges[0])
    assert torch.equal(whole[:, 25:], edges[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_adapters_rows_get_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    x, out = torch.randn(70, 32).to(dtype), torch.randn(70, 96).to(dtype)
    mine = (torch.tensor([3]), random_operand(32, QKV, dtype))
    other = (torch.arange(4, 70), random_operand(32, [(0, 96, 64)], dtype))
    alone, together = out.clone(), out.clone()

    run_segments(cpu, alone, x, [mine])
    run_segments(cpu, together, x, [mine, other])

    assert torch.equal(alone[3], together[3])


def test_a_linear_that_stayed_in_float32_gets_its_delta_too() -> None:
    x, out = torch.randn(4, 32), torch.randn(4, 96)
    weights = random_operand(32, QKV, torch.bfloat16)
    want = out.clone()
    rows = torch.tensor([1, 3])
    run_segments(naive, want, x, [(rows, cast(weights, torch.float32))])

    run_segments(cpu, out, x, [(rows, weights)])

    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_no_segment_are_not_read(dtype: torch.dtype) -> None:
    x, out = torch.randn(6, 32).to(dtype), torch.randn(6, 96).to(dtype)
    x[1::2] = float("nan")
    out[1::2] = float("nan")

    run_segments(cpu, out, x, [(torch.tensor([0, 2, 4]), random_operand(32, QKV, dtype))])

    assert out[::2].isfinite().all()
    assert out[1::2].isnan().all()


def run_embedding(
    kernel: Any, out: torch.Tensor, ids: torch.Tensor, segments: Sequence[Segment]
) -> None:
    batch = batch_of(segments, len(out))
    if batch is not None:
        kind = getattr(kernel, "EmbeddingLoRATable", kernel.LoRATable)
        table = table_of(kind, [weights for _, weights in segments])
        kernel.add_embedding_lora(out, ids, table, batch, 3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 25, 90])
@pytest.mark.parametrize("width", [1, 40, 640])
def test_an_embedding_looks_its_delta_up(dtype: torch.dtype, num_rows: int, width: int) -> None:
    out, ids = torch.randn(num_rows, width).to(dtype), torch.randint(0, 50, (num_rows,))
    rows = torch.randperm(num_rows)
    segments = [
        (rows[:1], random_operand(50, [(0, width, 3)], dtype)),
        (rows[1:70], random_operand(50, [(0, width, 16)], dtype)),
    ]
    want = out.clone().float()
    wide = [(r, cast(weights, torch.float32)) for r, weights in segments]
    run_embedding(naive, want, ids, wide)
    before = out.clone()

    run_embedding(cpu, out, ids, segments)

    unit = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.float(), want, rtol=unit, atol=1e-4)
    assert torch.equal(out[rows[70:]], before[rows[70:]])


def test_an_embeddings_ids_may_lie_apart_and_be_narrow() -> None:
    out, want = torch.zeros(3, 8), torch.zeros(3, 8)
    ids = torch.randint(0, 50, (3, 2), dtype=torch.int32)
    segments = [(torch.arange(3), random_operand(50, [(0, 8, 4)]))]

    run_embedding(naive, want, ids[:, 1].long(), segments)
    run_embedding(cpu, out, ids[:, 1], segments)

    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_wide_output_is_cut_into_parts_that_meet(threads: int) -> None:
    x, out = torch.randn(2, 32).bfloat16(), torch.randn(2, 20_001).bfloat16()
    segments = [(torch.arange(2), random_operand(32, [(0, 20_001, 16)], torch.bfloat16))]

    with torch_threads(threads):
        assert_equals_naive(out, x, segments)


def test_a_slot_that_is_filled_again_takes_the_new_weights() -> None:
    x, out, want = torch.randn(2, 64), torch.zeros(2, 96), torch.zeros(2, 96)
    first, second = (random_operand(64, [(0, 96, rank)]) for rank in (8, 33))
    table = table_of(cpu.LoRATable, [first])
    batch = LoRABatch.build([0, 0])
    assert batch is not None

    table.set(0, second)
    cpu.add_lora(out, x, table, batch)

    run_segments(naive, want, x, [(torch.arange(2), second)])
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_a_table_takes_its_memory_from_where_it_is_told_and_from_nowhere_else() -> None:
    class Counted(HugePageChunks):
        def __init__(self) -> None:
            super().__init__(1 << 16)
            self.num_tensors = 0

        def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            self.num_tensors += 1
            return super().empty(*shape, dtype=dtype)

    memory = Counted()
    weights = random_operand(8, [(0, 8, 4)])

    cpu.LoRATable(1, torch.float32, memory).set(0, weights)
    cpu.EmbeddingLoRATable(1, torch.float32, memory).set(0, weights)
    cpu.LoRATable(1, torch.float32).set(0, weights)

    assert memory.num_tensors == 2
    assert [n for n, x in vars(cpu).items() if isinstance(x, HugePageChunks)] == []

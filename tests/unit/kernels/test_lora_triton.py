"""LoRA in Triton against the naive one on the same weights in float32."""

from collections.abc import Sequence

import pytest
import torch
from support.kernels.far_rows import far_apart
from support.kernels.triton_interpreter import DEVICE, INTERPRETED
from support.models.lora import Segment, batch_of, cast, fill_table, random_operand
from torch import Tensor

from loraplex.kernels.lora import naive, triton, triton_tiles
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand
from loraplex.kernels.lora.triton import add_cut, add_embedding_lora, add_lora
from loraplex.kernels.lora.triton_table import EmbeddingLoRATable, LoRATable
from loraplex.kernels.lora.triton_tiles import LoRATiles, tiles_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RANKS = [1, 2, 3, 5, 8, 12, 16, 24, 33, 64, 100, 128, 256]
QKV = [(0, 64, 16), (64, 16, 16), (80, 16, 16)]  # slices: first column, width, rank
MANY_ROWS = 4096  # for which other tiles are chosen

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.device]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def table_of(operands: Sequence[LoRAOperand | None], dtype: torch.dtype) -> LoRATable:
    table: LoRATable = fill_table(LoRATable(len(operands), DEVICE, dtype), operands)
    return table


def on_device(segments: Sequence[Segment], num_rows: int, capacity: int | None = None) -> LoRABatch:
    batch = batch_of(segments, num_rows)
    assert batch is not None
    batch = LoRABatch.build(batch.token_slots.numpy(), DEVICE, capacity)
    assert batch is not None
    return batch


def assert_equals_naive(
    out: Tensor, x: Tensor, segments: Sequence[Segment], tiles: LoRATiles | None = None
) -> None:
    """Weights are of the dtype of x; rows without an adapter must keep their bits."""
    batch = on_device(segments, len(out), capacity=len(segments) + 2)
    operands = [weights for _, weights in segments]
    want, before = out.float(), out.clone()
    wide = [cast(weights, torch.float32) for weights in operands]
    naive.add_lora(want, x.float(), fill_table(naive.LoRATable(len(wide)), wide), batch)

    tiles = tiles or tiles_for(x.shape[0], x.shape[1], x.dtype)
    add_cut(tiles, out, x, table_of(operands, x.dtype), batch)

    base = batch.token_slots == -1
    assert torch.equal(out[base], before[base])
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[out.dtype]
    torch.testing.assert_close(out.float(), want, rtol=unit, atol=1e-5 * float(want.abs().max()))


def scaled(weights: LoRAOperand) -> LoRAOperand:
    """With another scaling in each slice."""
    slices = (part._replace(scaling=0.3 + i) for i, part in enumerate(weights.slices))
    return weights._replace(slices=tuple(slices))


def split(num_rows: int, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.randperm(num_rows)[: sum(sizes)].split(list(sizes)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, MANY_ROWS])
def test_all_ranks_in_one_batch_beside_base_rows(dtype: torch.dtype, num_rows: int) -> None:
    rows = split(40, [1, 2, 3, 4, 1, 1, 5, 2, 1, 3, 4, 1, 2])
    segments = [
        (r, random_operand(40, [(0, 50, rank)], dtype)) for r, rank in zip(rows, RANKS, strict=True)
    ]

    assert_equals_naive(
        random(40, 50, dtype=dtype),
        random(40, 40, dtype=dtype),
        segments,
        tiles_for(num_rows, 40, dtype),
    )


@pytest.mark.parametrize("programs", [1, 5])
def test_few_programs_take_many_tiles_in_turn(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiles, "PROGRAMS", programs)
    rows = split(80, [1, 16, 17, 33, 3])
    segments = [(r, random_operand(40, [(0, 30, 3), (30, 20, 18)])) for r in rows]

    assert_equals_naive(random(80, 50), random(80, 40), segments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unequal_slices_and_gaps_at_any_column(dtype: torch.dtype) -> None:
    rows = split(40, [9, 1, 21])
    segments = [
        (rows[0], random_operand(48, [(0, 64, 4), (64, 17, 64), (81, 142, 1)], dtype)),
        (rows[1], random_operand(48, [(65, 16, 16)], dtype)),
        (rows[2], random_operand(48, [(3, 64, 7), (207, 16, 3)], dtype)),
    ]
    segments = [(r, scaled(weights)) for r, weights in segments]

    assert_equals_naive(random(40, 223, dtype=dtype), random(40, 48, dtype=dtype), segments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "width"), [(1, 1), (515, 63), (2049, 129)])
def test_odd_widths_and_inputs_in_several_parts(
    dtype: torch.dtype, in_features: int, width: int
) -> None:
    segments = [(torch.tensor([2, 0]), random_operand(in_features, [(0, width, 4)], dtype))]

    assert_equals_naive(
        random(3, width, dtype=dtype), random(3, in_features, dtype=dtype), segments
    )


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33])
def test_any_number_of_rows_on_one_adapter(num_rows: int) -> None:
    segments = [(torch.arange(num_rows), random_operand(32, QKV))]

    assert_equals_naive(random(num_rows, 96), random(num_rows, 32), segments)


def test_an_adapter_for_each_row() -> None:
    segments = [(torch.tensor([9 - i]), random_operand(32, [(0, 48, i + 1)])) for i in range(10)]

    assert_equals_naive(random(10, 48), random(10, 32), segments)


@pytest.mark.parametrize(("rows", "width", "in_features"), [(0, 48, 8), (3, 0, 8), (3, 48, 0)])
def test_nothing_is_launched_where_there_are_no_numbers(
    rows: int, width: int, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in ("shrink_kernel", "expand_kernel"):
        monkeypatch.delattr(triton, kernel)
    sizes = (rows, rows, 1, 2)
    batch = LoRABatch(*(torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in sizes))
    table = LoRATable(1, DEVICE, torch.float32)

    add_lora(random(rows, width), random(rows, in_features), table, batch)


@pytest.mark.parametrize("scaling", [0.0, -1.5])
def test_any_scaling(scaling: float) -> None:
    a, (part,) = random_operand(32, [(0, 48, 4)])
    segments = [(torch.arange(3), LoRAOperand(a, (part._replace(scaling=scaling),)))]

    assert_equals_naive(random(4, 48), random(4, 32), segments)


def test_an_empty_slot_leaves_its_rows_as_they_are() -> None:
    segments = [(torch.tensor([0, 2]), random_operand(32, QKV)), (torch.tensor([1]), None)]
    batch = on_device([(rows, random_operand(32, QKV)) for rows, _ in segments], 3)
    out, x = random(3, 96), random(3, 32)
    before = out.clone()

    add_lora(out, x, table_of([segments[0][1], None], torch.float32), batch)

    assert torch.equal(out[1], before[1])
    assert not torch.equal(out[0], before[0])


def test_a_table_stays_where_it_is_when_adapters_come_and_go() -> None:
    first, second = random_operand(32, QKV), random_operand(32, [(0, 96, 5)])
    table = table_of([first], torch.float32)
    place = table.entries.data_ptr()
    x, out = random(2, 32), random(2, 96)
    segments = [(torch.tensor([1]), second)]
    batch, want = on_device(segments, 2), out.clone()
    naive.add_lora(want, x, fill_table(naive.LoRATable(1), [cast(second, x.dtype)]), batch)

    table.set(0, None)
    table.set(0, second)
    add_lora(out, x, table, batch)

    assert table.entries.data_ptr() == place
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_with_strides_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    x, whole = random(64, 10, dtype=dtype).t(), random(10, 50, dtype=dtype)
    edges = whole[:, :5].clone(), whole[:, 25:].clone()

    assert_equals_naive(
        whole[:, 5:25], x, [(torch.arange(3, 9), random_operand(64, [(0, 20, 4)], dtype))]
    )

    assert torch.equal(whole[:, :5], edges[0])
    assert torch.equal(whole[:, 25:], edges[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, MANY_ROWS])
def test_nothing_outside_of_an_adapters_weights_and_rows_is_read(
    dtype: torch.dtype, num_rows: int
) -> None:
    x, out = random(6, 48, dtype=dtype), random(6, 96, dtype=dtype)
    x[1::2] = out[1::2] = float("nan")
    a, parts = random_operand(48, [(0, 64, 3), (64, 16, 5), (80, 16, 1)], dtype)
    around = torch.full((a.shape[0] + 80, 48), float("nan")).to(DEVICE, dtype)
    around[40:-40] = a
    segments = [(torch.tensor([0, 2, 4]), LoRAOperand(around[40:-40], parts))]
    table = table_of([segments[0][1]], dtype)

    add_cut(tiles_for(num_rows, 48, dtype), out, x, table, on_device(segments, 6, capacity=4))

    assert out[::2].isfinite().all()
    assert out[1::2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, MANY_ROWS])
def test_an_adapters_rows_get_the_same_bits_alone_and_in_company(
    dtype: torch.dtype, num_rows: int
) -> None:
    x, out = random(70, 600, dtype=dtype), random(70, 96, dtype=dtype)
    mine = (torch.tensor([3, 5]), random_operand(600, QKV, dtype))
    others = (torch.arange(6, 70), random_operand(600, [(0, 96, 33)], dtype))
    tiles, table = tiles_for(num_rows, 600, dtype), table_of([mine[1], others[1]], dtype)
    alone, together = out.clone(), out.clone()

    add_cut(tiles, alone, x, table, on_device([mine], 70))
    add_cut(tiles, together, x, table, on_device([mine, others], 70, capacity=8))

    assert torch.equal(alone[mine[0]], together[mine[0]])


def test_columns_beside_a_slice_keep_their_bits_even_where_the_delta_is_not_finite() -> None:
    x, out = torch.full((1, 32), float("inf"), device=DEVICE), random(1, 48)
    out[0, 0] = -0.0
    segments, before = [(torch.tensor([0]), random_operand(32, [(3, 20, 4)]))], out.clone()

    add_lora(out, x, table_of([segments[0][1]], x.dtype), on_device(segments, 1))

    beside = [*range(3), *range(23, 48)]
    assert torch.equal(out[:, beside].view(torch.int32), before[:, beside].view(torch.int32))


def test_a_linear_that_stayed_in_float32_gets_its_delta_too() -> None:
    x, out = random(4, 32), random(4, 96)
    weights = random_operand(32, QKV, torch.bfloat16)
    segments, want = [(torch.tensor([1, 3]), weights)], out.clone()
    batch = on_device(segments, 4)
    naive.add_lora(want, x, fill_table(naive.LoRATable(1), [weights]), batch)

    add_lora(out, x, table_of([weights], torch.bfloat16), batch)

    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="maps memory that it never touches")
def test_rows_may_lie_further_apart_than_an_int32_counts() -> None:
    x, out = (far_apart(random(3, 48, dtype=torch.float16)) for _ in range(2))

    assert_equals_naive(out, x, [(torch.arange(3), random_operand(48, [(0, 48, 4)], x.dtype))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_embedding_looks_its_delta_up(dtype: torch.dtype) -> None:
    rows = split(20, [17, 2])
    operands = [random_operand(50, [(0, 40, rank)], dtype) for rank in (5, 40)]
    batch = on_device(list(zip(rows, operands, strict=True)), 20, capacity=4)
    ids, out = torch.randint(0, 50, (20,)).to(DEVICE), random(20, 40, dtype=dtype)
    wide = [cast(weights, torch.float32) for weights in operands]
    want = out.float()
    naive.add_embedding_lora(want, ids, fill_table(naive.LoRATable(2), wide), batch, 3.0)

    table = fill_table(EmbeddingLoRATable(2, DEVICE, dtype), operands)
    add_embedding_lora(out, ids, table, batch, embed_scale=3.0)

    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(out.float(), want, rtol=unit, atol=1e-4)


def test_an_adapter_with_more_slices_than_an_entry_holds_is_refused() -> None:
    table = LoRATable(1, DEVICE, torch.float32)

    with pytest.raises(ValueError, match="5 slices"):
        table.set(0, random_operand(8, [(8 * i, 8, 1) for i in range(5)]))

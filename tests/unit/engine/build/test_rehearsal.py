"""Steps that are rehearsed before the KV cache is made: they fit the model, and write nowhere."""

import numpy as np
import pytest

from loraplex.engine.build.rehearsal import StepLayout
from loraplex.engine.step import BASE_SLOT, NOWHERE

LONGEST = 100


@pytest.mark.parametrize(
    ("num_tokens", "context", "seq_lens"),
    [
        (1, 1, [1]),
        (1, LONGEST, [LONGEST]),
        (32, LONGEST, [LONGEST]),
        (250, 1, [100, 100, 50]),
        (200, 1, [100, 100]),
    ],
)
def test_a_rehearsed_step_holds_sequences_as_long_as_they_may_be(
    num_tokens: int, context: int, seq_lens: list[int]
) -> None:
    step = StepLayout(num_groups=2, block_size=8, max_model_len=LONGEST).step(
        num_tokens, context, num_rows=10, slot=BASE_SLOT
    )

    assert step.seq_lens.tolist() == seq_lens
    ends = np.diff(step.query_start)
    last = step.positions[step.query_start[1:] - 1]
    assert (last + 1).tolist() == seq_lens
    assert int(ends.sum()) == len(step.positions) == num_tokens
    assert int(step.positions.min()) >= 0
    assert step.block_tables.shape == (2, len(seq_lens), 13 if max(seq_lens) > 96 else 1)


def test_a_rehearsed_step_writes_nowhere_and_wants_its_last_rows() -> None:
    step = StepLayout(2, 8, LONGEST).step(40, 1, num_rows=3, slot=0)

    assert set(step.slot_mapping.flatten()) == {NOWHERE}
    assert step.logits_indices.tolist() == [37, 38, 39]
    assert step.has_adapter

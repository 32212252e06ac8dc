"""A step's new tokens in one row."""

from support.engine.kv import FULL_AND_SLIDING, admit, compute, kv_manager, sequence_of

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.step_input import ScheduledSequence, flatten, logits_rows
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.sequence import Sequence


def manager() -> KVCacheManager:
    return kv_manager(100, groups=FULL_AND_SLIDING)


def part(
    kv: KVCacheManager, sequence: Sequence, num_tokens: int, num_choices: int = 0
) -> ScheduledSequence:
    """The next tokens of a sequence; all before them are computed, or there are none."""
    assert kv.allocate_slots(sequence, num_tokens)
    return ScheduledSequence(sequence, num_tokens, num_choices)


def admitted(kv: KVCacheManager, first_token: int, length: int, num_computed: int = 0) -> Sequence:
    sequence = sequence_of(list(range(first_token, first_token + length)))
    admit(kv, sequence)
    if num_computed:
        compute(kv, sequence, num_computed)
    return sequence


def test_sequences_lie_one_after_another() -> None:
    kv = manager()
    chunk, decode = admitted(kv, 100, 20, num_computed=6), admitted(kv, 50, 9, num_computed=8)

    step = flatten([part(kv, chunk, 5), part(kv, decode, 1, num_choices=1)], kv)

    assert step.token_ids.tolist() == [106, 107, 108, 109, 110, 58]
    assert step.positions.tolist() == [6, 7, 8, 9, 10, 8]
    assert step.query_start.tolist() == [0, 5, 6]
    assert step.seq_lens.tolist() == [11, 9]
    assert step.logits_indices.tolist() == [5]


def test_a_token_is_written_into_its_block_of_each_group() -> None:
    kv = manager()
    sequence = admitted(kv, 3, 11, num_computed=6)

    step = flatten([part(kv, sequence, 5)], kv)

    blocks = kv.block_ids(sequence)
    for group in range(len(kv.groups)):
        slots = [int(blocks[group, p // 4]) * 4 + p % 4 for p in range(6, 11)]
        assert step.slot_mapping[group].tolist() == slots


def test_what_a_group_holds_already_is_not_written() -> None:
    kv = manager()
    sequence = admitted(kv, 3, 8)
    kv.first_writable(sequence)[:] = [0, 3, 8]

    step = flatten([part(kv, sequence, 8)], kv)

    written = [(slots >= 0).tolist() for slots in step.slot_mapping]
    assert written == [[True] * 8, [False] * 3 + [True] * 5, [False] * 8]


def test_a_prompt_whose_logprobs_are_wanted_has_a_row_for_each_token() -> None:
    kv = manager()
    sequence = sequence_of([5, 6, 7, 8], prompt_logprobs=1)
    admit(kv, sequence)

    items = [part(kv, sequence, 4, num_choices=1)]

    assert flatten(items, kv).logits_indices.tolist() == [0, 1, 2, 3]
    *prompt, last = logits_rows(items, StopChecker(frozenset()))
    assert [(row.position, row.token_id) for row in prompt] == [(1, 6), (2, 7), (3, 8)]
    assert (last.seq_id, last.position, last.num_choices) == (sequence.seq_id, 0, 1)

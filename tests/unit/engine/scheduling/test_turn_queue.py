"""Lines of waiting sequences are merged in order, and only their heads are looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.kv import sequence_of

from loraplex.engine.scheduling.queues import TurnQueue, WaitingQueue, queue_key
from loraplex.engine.sequence import Sequence


def sequence(adapter: str | None, priority: int = 0) -> Sequence:
    made = sequence_of([1], adapter=adapter)
    made.priority = priority
    return made


SEQUENCES = st.lists(
    st.builds(sequence, st.sampled_from([None, "a", "b"]), st.integers(-1, 1)), max_size=12
)


@given(sequences=SEQUENCES, running=SEQUENCES, begins=st.lists(st.booleans(), min_size=12))
def test_turns_go_in_order_whether_those_before_begin_or_not(
    sequences: list[Sequence], running: list[Sequence], begins: list[bool]
) -> None:
    waiting = WaitingQueue()
    for item in reversed(sequences):
        waiting.add(item)
    queue = TurnQueue(running, waiting.queues.values(), lambda head: True)

    turns = []
    while (head := queue.head()) is not None:
        turns.append(head)
        if head in waiting and begins[len(turns) % len(begins)]:
            waiting.remove(head)
        queue.advance(head)

    assert turns == [*sorted(running, key=order), *sorted(sequences, key=order)]


def test_a_line_has_gone_where_its_head_may_not_begin() -> None:
    first, second, behind = sequence("a"), sequence("b"), sequence("a")
    waiting = WaitingQueue()
    for item in (first, second, behind):
        waiting.add(item)

    queue = TurnQueue([], waiting.queues.values(), lambda head: head.adapter != first.adapter)

    assert queue.head() is second
    queue.advance(second)
    assert queue.head() is None


def test_a_queue_has_no_empty_lines() -> None:
    waiting, alone = WaitingQueue(), sequence("a")
    waiting.add(alone)
    assert list(waiting.queues) == [queue_key(alone)]

    waiting.remove(alone)

    assert not waiting
    assert not waiting.queues
    with pytest.raises(ValueError, match="not in list"):
        waiting.remove(alone)


def order(item: Sequence) -> tuple[int, int]:
    return item.order

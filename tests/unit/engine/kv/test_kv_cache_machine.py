"""Whatever sequences do, each reads its own history, and in the end everything is free."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.engine.kv import FULL_AND_SLIDING, admit, kv_manager, sequence_of
from support.engine.shadow_cache import PROMPT, ShadowCache

from loraplex.engine.kv.pinned_prompts import PinnedPrompt
from loraplex.engine.protocol import BasePromptRef
from loraplex.engine.sequence import Output, Sequence

NUM_BLOCKS = 40


class KVCacheMachine(RuleBasedStateMachine):
    """Two tenants, two adapters, few tokens and few blocks, so that all of them meet often."""

    block_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.kv = kv_manager(NUM_BLOCKS, self.block_size, FULL_AND_SLIDING)
        self.shadow = ShadowCache(self.kv)
        self.sequences: list[Sequence] = []
        self.num_published = 0

    @rule(
        length=st.integers(1, 40),
        family=st.integers(1, 2),
        branch=st.integers(0, 40),
        at_once=st.integers(0, 40),
        namespace=st.sampled_from(["x", "y"]),
        adapter=st.sampled_from([None, "a", "b"]),
        adapter_start=st.sampled_from([0, 0, 5, 8, 13]),
        frontier=st.integers(0, 3),
    )
    def begin(
        self,
        length: int,
        family: int,
        branch: int,
        at_once: int,
        **identity: Any,
    ) -> None:
        """A prompt of one of two families, which leaves its family's text at `branch`."""
        tokens = [family if i < branch else 10 * family for i in range(length)]
        sequence = sequence_of(tokens, **identity)
        plan = self.kv.plan(sequence)
        cached = plan.cached
        assert cached.num_tokens < length
        assert cached.end or cached.num_tokens % self.block_size == 0
        demand, num_free = sum(plan.demand.values()), self.kv.pool.num_free
        if demand <= num_free:
            num_tokens = min(at_once, plan.num_uncomputed_tokens)
            self.kv.commit(plan, num_tokens)
            assert num_free - self.kv.pool.num_free <= demand
            self.sequences.append(sequence)
            self.computed(sequence, num_tokens)

    @precondition(lambda self: len(self.kv.prompts) < 3)
    @rule(length=st.integers(1, 20), family=st.integers(1, 2))
    def publish(self, length: int, family: int) -> None:
        """The beginning of a family's text."""
        sequence = sequence_of([family] * length, namespace=PROMPT)
        sequence.output = Output.KEEP
        self.num_published += 1
        ref = BasePromptRef(prompt_id="prompt", version=self.num_published)
        self.kv.prompts.add(ref, sequence)
        admit(self.kv, sequence)
        self.sequences.append(sequence)

    @precondition(lambda self: self.settled_prompts())
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.settled_prompts()))
        self.kv.prompts.remove(prompt)
        self.kv.free(prompt.sequence)

    def settled_prompts(self) -> list[PinnedPrompt]:
        return [p for p in self.kv.prompts if p.sequence not in self.sequences]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), at_most=st.integers(1, 20))
    def compute(self, data: st.DataObject, at_most: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.advance(sequence, min(at_most, sequence.num_uncomputed_tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(1, 2), min_size=1, max_size=6))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.output is Output.KEEP:
            return
        for token in tokens:
            if sequence in self.sequences and sequence.num_tokens < 60:
                self.advance(sequence, sequence.num_uncomputed_tokens)
                sequence.token_ids.append(token)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        if not self.kv.allocate_slots(sequence, num_tokens):
            self.drop(sequence)  # preempted
            return
        self.computed(sequence, num_tokens)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        self.nothing_is_held_behind_the_window(sequence)
        self.shadow.write(sequence, num_tokens)
        sequence.num_computed_tokens += num_tokens
        self.kv.index_computed(sequence)
        if sequence.output is Output.KEEP and sequence.num_uncomputed_tokens == 0:
            self.sequences.remove(sequence)
            self.kv.pin(self.prompt_of(sequence))

    def drop(self, sequence: Sequence) -> None:
        if sequence.output is Output.KEEP:
            self.kv.prompts.remove(self.prompt_of(sequence))
        self.kv.free(sequence)
        self.sequences.remove(sequence)

    def prompt_of(self, sequence: Sequence) -> PinnedPrompt:
        return next(prompt for prompt in self.kv.prompts if prompt.sequence is sequence)

    def nothing_is_held_behind_the_window(self, sequence: Sequence) -> None:
        table, start = self.kv.block_ids(sequence), sequence.num_computed_tokens
        for row, group in zip(table, self.kv.groups, strict=True):
            window = group.state.window or start + 1
            assert not row[: max(0, start - window + 1) // self.block_size].any()
        assert self.kv.num_held_blocks(sequence) == (table > 0).sum()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.sequences))
        if parent.output is Output.KEEP:
            return
        if parent.num_uncomputed_tokens == 0 and len(self.sequences) < 8:
            child = parent.fork(1)
            self.kv.fork(parent, child)
            self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.sequences)))

    @invariant()
    def books_balance(self) -> None:
        self.kv.check_integrity()

    @invariant()
    def each_reads_its_own_history(self) -> None:
        for sequence in self.sequences:
            self.shadow.check(sequence)

    @invariant()
    def slots_are_counted_right(self) -> None:
        used: dict[int, int] = {}
        prompts = [prompt.sequence for prompt in self.settled_prompts()]
        for sequence in [*self.sequences, *prompts]:
            first_writable = self.kv.first_writable(sequence).tolist()
            for row, written in zip(
                self.kv.block_ids(sequence).tolist(), first_writable, strict=True
            ):
                for index, block in enumerate(row):
                    end = max(written, sequence.num_computed_tokens)
                    tokens = end - index * self.block_size
                    filled = max(0, min(self.block_size, tokens))
                    if block:
                        used[block] = max(used.get(block, 0), filled)
        assert self.kv.slots() == (len(used) * self.block_size, sum(used.values()))

    def teardown(self) -> None:
        for prompt in self.settled_prompts():
            self.kv.free(prompt.sequence)
        for sequence in self.sequences:
            self.kv.free(sequence)
        self.kv.check_integrity()
        assert self.kv.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_sequence_reads_its_own_history(block_size: int) -> None:
    machine = type("Machine", (KVCacheMachine,), {"block_size": block_size})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40)

    case().runTest()

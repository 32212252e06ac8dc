"""Every slot is one block's, and no block leaves while it is needed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.engine.offload import key_of, tokens_of

from loraplex.engine.kv.offload.host_tier import HostTier
from loraplex.engine.kv.tiers import HostBlock

NUMBERS = st.integers(0, 12)


def put(tier: HostTier, number: int, account: str = "a") -> HostBlock:
    block = tier.reserve(key_of(number), tokens_of(number), account)
    assert block is not None
    tier.arrive(block)
    return block


def find(tier: HostTier, number: int) -> HostBlock | None:
    return tier.find(key_of(number), tokens_of(number))


def test_the_oldest_block_leaves_when_a_slot_is_needed() -> None:
    left: list[HostBlock] = []
    tier = HostTier(2, left.append)
    first, second = put(tier, 1), put(tier, 2)

    third = put(tier, 3)

    assert (left, third.slot) == ([first], first.slot)
    assert (find(tier, 1), find(tier, 2)) == (None, second)


def test_equal_keys_with_other_tokens_do_not_match() -> None:
    tier = HostTier(2, lambda block: None)
    put(tier, 1)

    assert tier.find(key_of(1), tokens_of(2)) is None


def test_a_block_on_its_way_does_not_leave() -> None:
    tier = HostTier(1, lambda block: None)
    tier.reserve(key_of(1), tokens_of(1), "a")

    assert tier.reserve(key_of(2), tokens_of(2), "a") is None


def test_a_block_that_is_read_does_not_leave() -> None:
    tier = HostTier(1, lambda block: None)
    block = put(tier, 1)
    tier.pin(block)

    refused = tier.reserve(key_of(2), tokens_of(2), "a")
    tier.unpin(block)

    assert refused is None
    assert tier.reserve(key_of(2), tokens_of(2), "a") is not None


def test_a_tenant_that_floods_the_tier_leaves_another_its_blocks() -> None:
    tier = HostTier(10, lambda block: None)
    for number in range(4):
        put(tier, number, "quiet")

    for number in range(100, 200):
        put(tier, number, "flood")

    assert tier.usage == {"quiet": 4, "flood": 6}


class HostTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(5, self.leave)
        self.present: dict[int, HostBlock] = {}

    def leave(self, block: HostBlock) -> None:
        assert block.is_here
        assert not block.num_pins
        self.present = {n: b for n, b in self.present.items() if b is not block}

    @rule(number=NUMBERS)
    def reserve(self, number: int) -> None:
        block = self.tier.reserve(key_of(number), tokens_of(number), "ab"[number % 2])
        if block is not None:
            assert number not in self.present
            self.present[number] = block

    @rule(number=NUMBERS)
    def arrive(self, number: int) -> None:
        block = self.present.get(number)
        if block is not None and not block.is_here:
            self.tier.arrive(block)

    @rule(number=NUMBERS)
    def pin(self, number: int) -> None:
        block = self.present.get(number)
        if block is not None and block.is_here:
            self.tier.pin(block)

    @rule(number=NUMBERS)
    def unpin(self, number: int) -> None:
        block = self.present.get(number)
        if block is not None and block.num_pins:
            self.tier.unpin(block)

    @invariant()
    def the_books_balance(self) -> None:
        self.tier.check_integrity()
        assert len(self.tier) == len(self.present)
        assert len({block.slot for block in self.present.values()}) == len(self.present)
        assert all(find(self.tier, number) is block for number, block in self.present.items())


HostTierMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestHostTier = HostTierMachine.TestCase

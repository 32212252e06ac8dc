"""The pool's book balances, and a free block remembers its prefix until it is handed out."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.instructions import count_lines

from loraplex.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock

TOKENS = (1, 2, 3, 4)


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks + 1)


def remembered(pool: BlockPool, key: bytes, tokens: tuple[int, ...] = TOKENS) -> KVCacheBlock:
    """A block that is held and in the prefix index of group 0."""
    block = pool.allocate("tenant")
    pool.index(block, 0, key, tokens)
    return block


def test_the_null_block_is_never_handed_out() -> None:
    pool = pool_of(3)

    handed_out = {pool.allocate("tenant").block_id for _ in range(3)}

    assert handed_out == {1, 2, 3}


def test_an_empty_pool_says_so() -> None:
    pool = pool_of(1)
    pool.allocate("tenant")

    with pytest.raises(MemoryError, match="no free KV block"):
        pool.allocate("tenant")


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = pool_of(1)
    block = pool.allocate("tenant")
    pool.retain(block)

    pool.release([block])
    free_after_one = pool.num_free
    pool.release([block])

    assert (free_after_one, pool.num_free) == (0, 1)


def test_releasing_more_often_than_held_is_an_error_that_names_the_block() -> None:
    pool = pool_of(2)
    block = pool.allocate("tenant")
    pool.release([block])

    with pytest.raises(RuntimeError, match="block 1 was released more often"):
        pool.release([block])


def test_releasing_the_null_block_changes_nothing() -> None:
    pool = pool_of(2)

    pool.release([pool.null_block, pool.null_block])

    pool.check_integrity({})


def test_a_free_block_can_be_found_and_held_again() -> None:
    pool = pool_of(2)
    block = remembered(pool, b"key")
    pool.release([block])

    found = pool.find(0, b"key", TOKENS)
    assert found is block
    pool.retain(found)

    assert (block.ref_count, pool.num_free, pool.num_cached) == (1, 1, 0)


def test_a_block_forgets_its_prefix_when_it_is_handed_out() -> None:
    pool = pool_of(1)
    pool.release([remembered(pool, b"key")])

    pool.allocate("tenant")

    assert pool.find(0, b"key", TOKENS) is None


def test_the_block_unused_the_longest_is_handed_out_first() -> None:
    pool = pool_of(3)
    first, second, third = (remembered(pool, bytes([i])) for i in range(3))
    pool.release([second, first, third])

    order = [pool.allocate("tenant") for _ in range(3)]

    assert order == [second, first, third]


def test_use_makes_a_block_young_again() -> None:
    pool = pool_of(2)
    old, young = remembered(pool, b"old"), remembered(pool, b"young")
    pool.release([old, young])
    pool.retain(old)
    pool.release([old])

    assert pool.allocate("tenant") is young


def test_blocks_without_a_prefix_are_reused_before_any_that_has_one() -> None:
    pool = pool_of(3)
    cached, plain = remembered(pool, b"key"), pool.allocate("tenant")
    pool.release([cached, plain])

    handed_out = [pool.allocate("tenant"), pool.allocate("tenant")]

    assert handed_out == [plain, pool.blocks[3]]
    assert pool.find(0, b"key", TOKENS) is cached


def test_equal_content_is_indexed_once_and_its_twin_remembers_nothing() -> None:
    pool = pool_of(2)
    block, twin = remembered(pool, b"key"), remembered(pool, b"key")

    pool.release([block, twin])

    assert pool.num_cached == 1
    assert pool.allocate("tenant") is twin
    assert pool.find(0, b"key", TOKENS) is block


def test_a_key_belongs_to_one_group() -> None:
    pool = pool_of(2)
    remembered(pool, b"key")

    assert pool.find(1, b"key", TOKENS) is None


def test_a_hit_needs_the_same_tokens_not_only_the_same_key() -> None:
    pool = pool_of(1)
    remembered(pool, b"key", (1, 2, 3, 4))

    assert pool.find(0, b"key", (1, 2, 3, 5)) is None


@pytest.mark.parametrize("operation", ["allocate", "release", "share", "find", "remember"])
def test_no_operation_looks_at_more_blocks_in_a_larger_pool(operation: str) -> None:
    assert lines_run(operation, num_blocks=10) == lines_run(operation, num_blocks=1000)


def lines_run(operation: str, num_blocks: int) -> int:
    """How many lines of Python one operation takes on a pool whose blocks are all cached."""
    pool = pool_of(num_blocks)
    blocks = [remembered(pool, str(i).encode()) for i in range(num_blocks)]
    pool.release(blocks)
    held = pool.allocate("tenant")
    run = {
        "allocate": lambda: pool.allocate("tenant"),
        "release": lambda: pool.release([held]),
        "share": lambda: pool.retain(blocks[5]),
        "find": lambda: pool.find(0, b"7", TOKENS),
        "remember": lambda: pool.index(held, 0, b"new", TOKENS),
    }[operation]
    return count_lines(run)


def free_but_held(pool: BlockPool) -> None:
    pool.blocks[1].ref_count = 1


def lost(pool: BlockPool) -> None:
    pool.allocate("tenant").ref_count = 0


def indexed_elsewhere(pool: BlockPool) -> None:
    block = remembered(pool, b"key")
    pool.release([block])
    block.key = (0, b"other")


def null_block_held(pool: BlockPool) -> None:
    pool.blocks[NULL_BLOCK_ID].ref_count = 1


def nothing(pool: BlockPool) -> None:
    pool.allocate("tenant")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (free_but_held, "block 1 is both free and held, or neither"),
        (lost, "block 1 is both free and held, or neither"),
        (indexed_elsewhere, "block 1 believes to be indexed and is not"),
        (null_block_held, "the null block was handed out"),
        (nothing, "block 1 has 1 references but 0 holders"),
    ],
)
def test_the_audit_finds_a_cooked_book(damage: Callable[[BlockPool], None], complaint: str) -> None:
    pool = pool_of(2)
    damage(pool)

    with pytest.raises(RuntimeError, match=complaint):
        pool.check_integrity({})


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool beside a model: a list of free blocks in the order of reuse."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(4)
        self.held: list[KVCacheBlock] = []  # one entry per holder
        self.free = [block.block_id for block in self.pool.blocks[1:]]
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @precondition(lambda self: self.free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate("tenant")
        assert block.block_id == self.free.pop(0)
        self.content.pop(block.block_id, None)
        self.held.append(block)

    @precondition(lambda self: not self.free)
    @rule()
    def allocate_from_empty(self) -> None:
        with pytest.raises(MemoryError):
            self.pool.allocate("tenant")

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.retain(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release([block])
        if block in self.held:
            return
        first = block.block_id not in self.content
        self.free.insert(0 if first else len(self.free), block.block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c"]))
    def index(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.index(block, 0, key, (key[0],))
        is_known = any(known == key for known, _ in self.content.values())
        if not is_known and block.block_id not in self.content:
            self.content[block.block_id] = (key, (key[0],))

    @rule(key=st.sampled_from([b"a", b"b", b"c"]))
    def find_and_hold(self, key: bytes) -> None:
        block = self.pool.find(0, key, (key[0],))
        expected = [i for i, (known, _) in self.content.items() if known == key]
        assert ([block.block_id] if block else []) == expected
        if block is not None:
            self.pool.retain(block)
            self.held.append(block)
            if block.block_id in self.free:
                self.free.remove(block.block_id)

    @invariant()
    def books_agree(self) -> None:
        holders: dict[int, int] = {}
        for block in self.held:
            holders[block.block_id] = holders.get(block.block_id, 0) + 1
        self.pool.check_integrity(holders)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.content.keys() & set(self.free))

    def teardown(self) -> None:
        self.pool.release(self.held)
        assert self.pool.num_free == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase

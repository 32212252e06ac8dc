"""Random use of a pool by several accounts under changing shares: the books stay exact."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.engine.kv.block_pool import BlockPool, KVCacheBlock
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.kv.metering import EvictionCause
from loraplex.engine.protocol import TenantShare

NUM_BLOCKS = 12
TENANTS = ("a", "b", "c")
ACCOUNTS = st.sampled_from([*TENANTS, OPERATOR])
FLOORS, CEILINGS = st.integers(0, 6), st.none() | st.integers(0, 12)


class BudgetsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS + 1, on_evict=self.note_eviction)
        self.held: list[tuple[KVCacheBlock, str]] = []  # one entry per holder
        self.needy: str | None = None  # who allocates right now
        self.num_keys = 0

    @rule(account=ACCOUNTS, remembers=st.booleans())
    def allocate(self, account: str, remembers: bool) -> None:
        if not self.pool.num_available(account):
            return
        charged = self.pool.budgets.of(account).charged
        self.needy = account
        block = self.pool.allocate(account)
        self.needy = None
        if remembers:
            self.num_keys += 1
            self.pool.index(block, 0, str(self.num_keys).encode(), (self.num_keys,))
        self.held.append((block, account))
        share = self.pool.budgets.of(account)
        assert share.ceiling is None or share.charged <= max(charged, share.ceiling)

    @rule(account=ACCOUNTS)
    def take_all_that_is_promised(self, account: str) -> None:
        for _ in range(self.pool.num_available(account)):
            self.allocate(account, False)
        assert self.pool.num_available(account) == 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), holder=ACCOUNTS)
    def share(self, data: st.DataObject, holder: str) -> None:
        block, _ = data.draw(st.sampled_from(self.held))
        self.pool.retain(block, holder)
        self.held.append((block, holder))

    @rule(account=ACCOUNTS)
    def take_a_cached_block_back(self, account: str) -> None:
        mine = [b for b in self.pool.blocks if b.account == account and not b.ref_count and b.key]
        if mine and self.pool.num_available(account):
            self.pool.retain(mine[0])
            self.held.append((mine[0], account))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block, holder = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release([block], holder)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), account=ACCOUNTS)
    def recharge(self, data: st.DataObject, account: str) -> None:
        block, _ = data.draw(st.sampled_from(self.held))
        if self.pool.num_available(account):
            self.pool.recharge(block, account)

    @rule(floors=st.dictionaries(st.sampled_from(TENANTS), st.tuples(FLOORS, CEILINGS), min_size=1))
    def set_shares(self, floors: dict[str, tuple[int, int | None]]) -> None:
        before = {name: self.pool.budgets.of(name).floor for name in TENANTS}
        shares = [TenantShare(name, *share) for name, share in floors.items()]
        faults = self.pool.set_shares(shares)
        after = before | {name: floor for name, (floor, _) in floors.items()}
        pinned = self.pool.budgets.of(OPERATOR).held
        is_sound = all(c is None or c >= f for f, c in floors.values())
        assert (faults == []) == (is_sound and sum(after.values()) + pinned <= NUM_BLOCKS)
        if faults:
            assert before == {name: self.pool.budgets.of(name).floor for name in TENANTS}

    def note_eviction(self, block: KVCacheBlock) -> None:
        """A floor guards cached blocks from everyone but their owner."""
        if self.needy is not None and self.needy != block.account:
            assert self.pool.budgets.of(block.account).is_over_floor

    @invariant()
    def books_agree_with_a_recount(self) -> None:
        self.pool.check_integrity(Counter(block.block_id for block, _ in self.held))

    @invariant()
    def floors_are_whole_unless_one_was_raised(self) -> None:
        budgets = self.pool.budgets
        claims = sum(max(account.held, account.floor) for account in budgets.accounts)
        assert budgets.is_overdrawn == (claims > NUM_BLOCKS)
        for account in budgets.accounts:
            unused = account.floor - account.held
            if not budgets.is_overdrawn and unused > 0:
                assert self.pool.num_available(account.name) >= unused

    @invariant()
    def cached_blocks_fit_below_the_ceiling(self) -> None:
        for account in self.pool.budgets.accounts:
            if account.is_over_ceiling:
                assert account.cached == 0

    @invariant()
    def meters_count_what_is_there(self) -> None:
        users = Counter(holder for _, holder in self.held)
        for account in self.pool.budgets.accounts:
            meter = self.pool.metering.of(account.name)
            counts = (meter.num_held, meter.cached.count, meter.num_used)
            assert counts == (account.held, account.cached, users[account.name])
            assert meter.saved.count == max(0, users[account.name] - account.held)
            shared = {b.block_id for b, _ in self.held if b.ref_count > 1}
            assert meter.shared.count == sum(
                self.pool.blocks[i].account == account.name for i in shared
            )
            assert set(meter.evictions) <= set(EvictionCause)

    def teardown(self) -> None:
        for block, holder in self.held:
            self.pool.release([block], holder)
        assert self.pool.num_free == NUM_BLOCKS


TestBudgetsMachine = BudgetsMachine.TestCase
TestBudgetsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

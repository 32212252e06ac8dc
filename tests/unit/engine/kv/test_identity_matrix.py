"""Every ordered pair of identities: blocks are shared where all that they depend on is equal."""

from dataclasses import dataclass, replace
from itertools import product, takewhile

import pytest
from support.engine.kv import SCOPE, admit, compute, kv_manager, run_through, sequence_of

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.protocol import BasePromptRef
from loraplex.engine.sequence import Sequence

BLOCK = 4
TOKENS = list(range(1, 18))  # four blocks and a token
PUBLIC = 6  # tokens of the base prompt: a block and a half


@dataclass(frozen=True)
class Identity:
    namespace: str
    kv_format: str
    adapter: str | None = None  # its content: another version is another one
    start: int = 0  # its activation mode, as the token that it acts from
    frontier: int = 0

    @property
    def sequence(self) -> Sequence:
        return sequence_of(
            TOKENS,
            namespace=self.namespace,
            adapter=self.adapter,
            adapter_start=self.start,
            frontier=self.frontier,
        )

    def content(self, num_public: int) -> list[tuple[object, ...]]:
        """Per token, all that may tell it from the same token of another sequence."""
        tokens: list[tuple[object, ...]] = []
        for position in range(len(TOKENS)):
            acts = self.adapter is not None and position >= self.start and not self.frontier
            is_public = position < num_public and not acts
            owner = None if is_public else self.namespace
            tokens.append((self.kv_format, owner, self.adapter if acts else None))
        return tokens


MODES = [(0, 0), (BLOCK, 0), (PUBLIC, 0), (PUBLIC + 1, 0), (0, 1)]  # starts and frontiers
IDENTITIES = [
    Identity(namespace, kv_format, adapter, start, frontier)
    for namespace, kv_format in product(("x", "y"), ("float32", "bfloat16"))
    for adapter, modes in ((None, MODES[:1]), ("a1", MODES), ("a2", MODES), ("b", MODES))
    for adapter, (start, frontier) in product([adapter], modes)
]


@pytest.mark.parametrize("is_published", [False, True], ids=["private", "published"])
@pytest.mark.parametrize("first", IDENTITIES, ids=str)
def test_a_hit_is_as_long_as_the_identities_are_equal(first: Identity, is_published: bool) -> None:
    found = {second: hit(first, second, is_published) for second in IDENTITIES}

    assert found == {second: expected(first, second, is_published) for second in IDENTITIES}


def hit(first: Identity, second: Identity, is_published: bool) -> int:
    one = kv_manager(40, BLOCK, scope=replace(SCOPE, kv_format=first.kv_format))
    if is_published:
        publish(one)
    run_through(one, first.sequence)
    if second.kv_format == first.kv_format:
        return run_through(one, second.sequence)
    scope = replace(SCOPE, kv_format=second.kv_format)
    return run_through(KVCacheManager(one.pool, one.layout, scope), second.sequence)


def publish(kv: KVCacheManager) -> None:
    sequence = sequence_of(TOKENS[:PUBLIC], namespace="operator")
    prompt = kv.prompts.add(BasePromptRef(prompt_id="prompt", version=1), sequence)
    admit(kv, sequence)
    compute(kv, sequence)
    kv.pin(prompt)


def expected(first: Identity, second: Identity, is_published: bool) -> int:
    """Whole blocks of equal tokens; of a published prompt also the half one at its end."""
    whole_public = PUBLIC // BLOCK * BLOCK if is_published else 0
    pairs = zip(first.content(whole_public), second.content(whole_public), strict=True)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    is_base = second.adapter is None or second.start >= PUBLIC or bool(second.frontier)
    reusable = shared // BLOCK * BLOCK
    if is_published and first.kv_format == second.kv_format:
        acts_at_once = second.adapter is not None and second.start < BLOCK and not second.frontier
        reusable = max(reusable, 0 if acts_at_once else whole_public, PUBLIC if is_base else 0)
    return reusable

"""HostCache: a budget of bytes, least recently used out first."""

from loraplex.adapters.residency.host_cache import HostCache
from loraplex.adapters.weights import LoRAWeights


def weights(num_bytes: int) -> LoRAWeights:
    return LoRAWeights({}, num_bytes)


def test_keeps_to_its_budget_by_dropping_the_least_recently_used() -> None:
    cache = HostCache(10)
    for digest in ("a", "b"):
        cache.put(digest, weights(5))
    cache.get("a")
    cache.put("c", weights(5))
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)
    assert cache.num_bytes == 10


def test_the_newest_stays_even_beyond_the_budget() -> None:
    cache = HostCache(10)
    cache.put("a", weights(4))
    cache.put("b", weights(20))
    assert (len(cache), cache.num_bytes) == (1, 20)


def test_the_same_content_is_counted_once() -> None:
    cache = HostCache(10)
    cache.put("a", weights(5))
    cache.put("a", weights(5))
    assert cache.num_bytes == 5


def test_what_is_discarded_is_gone() -> None:
    cache = HostCache(10)
    cache.put("a", weights(5))
    cache.discard("a")
    cache.discard("never there")
    assert (cache.get("a"), cache.num_bytes) == (None, 0)


def test_what_is_offered_takes_only_room_that_is_free() -> None:
    cache = HostCache(10)
    cache.put("a", weights(5))
    cache.offer("b", weights(5))
    cache.offer("c", weights(1))
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, True, False)


def test_what_is_offered_and_there_already_is_not_taken_for_used() -> None:
    cache = HostCache(10)
    cache.put("a", weights(5))
    cache.put("b", weights(5))
    cache.offer("a", weights(5))
    cache.put("c", weights(5))
    assert ("a" in cache, "b" in cache, "c" in cache) == (False, True, True)

"""AdapterLoader: loads on a thread, fails on its own, tries again."""

import threading
from collections.abc import Callable, Iterator

import pytest

from loraplex.adapters.errors import AdapterUnavailable
from loraplex.adapters.residency.host_cache import HostCache
from loraplex.adapters.residency.loader import AdapterLoader
from loraplex.adapters.weights import LoRAWeights

WEIGHTS = LoRAWeights({}, 8)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache() -> HostCache:
    return HostCache(100)


@pytest.fixture
def loader(cache: HostCache, clock: Clock) -> Iterator[AdapterLoader]:
    loader = AdapterLoader(cache, clock)
    yield loader
    loader.close()


def fail() -> LoRAWeights:
    raise AdapterUnavailable("gone")


def until(condition: Callable[[], object]) -> None:
    while not condition():
        threading.Event().wait(0.001)


def test_a_load_does_not_hold_up_the_caller(loader: AdapterLoader) -> None:
    gate = threading.Event()

    def load() -> LoRAWeights:
        gate.wait()
        return WEIGHTS

    assert not loader.ready("a", load)
    gate.set()
    until(lambda: loader.ready("a", fail))
    assert loader.num_loads == 1


def test_a_failure_is_told_until_it_may_be_tried_again(loader: AdapterLoader, clock: Clock) -> None:
    loader.ready("a", fail)
    until(lambda: loader.error("a"))
    assert not loader.ready("a", lambda: WEIGHTS)
    clock.now += 1.0
    assert loader.error("a") is None
    until(lambda: loader.ready("a", lambda: WEIGHTS))


def test_one_failure_is_no_other_adapters_failure(loader: AdapterLoader) -> None:
    loader.ready("a", fail)
    until(lambda: loader.error("a"))
    until(lambda: loader.ready("b", lambda: WEIGHTS))
    assert loader.error("b") is None


def test_a_failure_of_any_kind_is_told_as_the_adapters(
    loader: AdapterLoader, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down() -> LoRAWeights:
        raise MemoryError

    loader.ready("a", break_down)
    until(lambda: loader.error("a"))
    assert isinstance(loader.error("a"), AdapterUnavailable)
    assert "MemoryError" in caplog.text


def test_a_forgotten_load_leaves_nothing(loader: AdapterLoader, cache: HostCache) -> None:
    gate = threading.Event()

    def load() -> LoRAWeights:
        gate.wait()
        return WEIGHTS

    loader.ready("a", load)
    loader.forget("a")
    gate.set()
    until(lambda: loader.ready("b", lambda: WEIGHTS))  # the same thread, so after "a"
    assert ("a" in cache, loader.num_loads) == (False, 1)

"""A full server says so, and when to come again."""

import pytest

from loraplex.platform.errors import InvalidRequest, TooManyRequests
from loraplex.platform.inference.load import Load


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tenant_leaves_room_for_others() -> None:
    load = Load(max_choices=8)

    with load.hold("a", 6):
        with pytest.raises(TooManyRequests, match=r"^Your requests"):
            load.check("a")
        with load.hold("b", 2), pytest.raises(TooManyRequests, match=r"^The server's requests"):
            load.check("c")
        load.check("c")
    load.check("a", 6)


def test_what_can_never_be_taken_is_no_matter_of_time() -> None:
    with pytest.raises(InvalidRequest, match="at most 6 choices"):
        Load(max_choices=8).check("a", 7)


@pytest.mark.parametrize(
    ("num_ended", "every", "seconds"), [(0, 1, 10), (20, 0.5, 2), (20, 2.0, 8), (200, 0.05, 1)]
)
def test_the_time_to_wait_is_what_the_ends_of_others_tell(
    num_ended: int, every: float, seconds: int
) -> None:
    clock = Clock()
    load = Load(max_choices=1000, clock=clock)
    for _ in range(num_ended):
        with load.hold("a", 1):
            clock.now += every

    with load.hold("a", 748), pytest.raises(TooManyRequests) as caught:
        load.check("a", 6)

    assert caught.value.headers == {"retry-after": str(seconds)}

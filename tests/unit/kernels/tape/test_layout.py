"""Where buffers lie: apart while both are in use, and close together."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.tape.layout import Buffer, lay_out

BUFFERS = st.lists(
    st.builds(
        lambda size, first, length: Buffer(size, first, first + length),
        st.integers(0, 300),
        st.integers(0, 12),
        st.integers(0, 6),
    ),
    max_size=20,
)


@given(BUFFERS)
def test_buffers_in_use_at_the_same_step_do_not_overlap(buffers: list[Buffer]) -> None:
    layout = lay_out(buffers)

    placed = list(zip(buffers, layout.offsets, strict=True))
    for index, (a, start) in enumerate(placed):
        assert start % 64 == 0
        assert start + a.num_bytes <= layout.num_bytes
        for b, other in placed[:index]:
            meet = a.first <= b.last and b.first <= a.last
            apart = start + a.num_bytes <= other or other + b.num_bytes <= start
            assert apart or not meet


def test_memory_that_is_not_in_use_any_more_is_taken_again() -> None:
    chain = [Buffer(100, step, step + 1) for step in range(50)]

    assert lay_out(chain).num_bytes == 2 * 128

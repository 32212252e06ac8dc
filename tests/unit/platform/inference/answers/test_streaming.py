"""Frames of an event stream."""

import json

from loraplex.platform.inference.answers.streaming import _frame


def test_no_text_ends_a_line_of_the_stream() -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne\x0bf\x1cg \u00c2\u0084 \U00013000"

    frame = _frame({"text": text}).decode()

    assert frame.splitlines() == [frame.removesuffix("\n\n"), ""]
    assert json.loads(frame.removeprefix("data: ")) == {"text": text}

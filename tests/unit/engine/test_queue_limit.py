"""A tenant's queue has an end, and nobody else's ends with it."""

from pathlib import Path

import msgspec
import pytest
from support.engine.engines import make_engine, request

from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import FailureCode


def test_who_has_filled_its_queue_is_refused_and_others_are_not(
    model: Path, tmp_path: Path
) -> None:
    engine = make_engine(
        model, tmp_path / "store", kernels="naive", max_num_seqs=2, max_num_waiting=3
    )
    one = request([1, 2, 3], "one")
    for number in range(2 + 3):
        engine.add(msgspec.structs.replace(one, request_id=f"{number}"))

    with pytest.raises(RequestRejected) as refusal:
        engine.add(one)
    engine.add(msgspec.structs.replace(one, request_id="another's", tenant="another"))

    assert refusal.value.code is FailureCode.QUEUE_FULL
    engine.close()

"""Uploads: arrays of a step arrive where they belong, and none is overwritten while it is read."""

import numpy as np
import pytest
import torch
from support.kernels.fake_cuda import fake_runtime

from loraplex.engine.worker.replay.uploads import Uploads

CPU = torch.device("cpu")


class Event:
    """Notes in a log what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def record(self) -> None:
        self._log.append(f"record {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"wait for {self._name}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> Uploads:
    fake_runtime(monkeypatch)
    names = iter("ab")
    uploads = Uploads(CPU, lambda: Event(next(names), log))
    uploads.reserve(1000)
    return uploads


def test_parts_of_any_format_and_layout_arrive(uploads: Uploads) -> None:
    wide, narrow = torch.zeros(3, 10, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
    numbers = np.arange(12, dtype=np.int64).reshape(3, 4)

    uploads.add(np.array([7, 8, 9], np.int32), narrow[:3])
    uploads.add(numbers, wide[:, :4])
    uploads.add(numbers[:, ::2], wide[:, 8:])
    uploads.send()

    assert narrow.tolist() == [7, 8, 9, 0, 0]
    assert wide[:, :4].tolist() == numbers.tolist()
    assert wide[:, 8:].tolist() == numbers[:, ::2].tolist()
    assert wide[:, 4:8].sum() == 0


def test_what_is_added_is_taken_in_at_once(uploads: Uploads) -> None:
    source, target = np.ones(4, np.int64), torch.zeros(4, dtype=torch.int64)

    uploads.add(source, target)
    source[:] = 5
    uploads.send()

    assert target.tolist() == [1, 1, 1, 1]


def test_memory_is_filled_again_only_when_its_copy_has_been_read(
    uploads: Uploads, log: list[str]
) -> None:
    target = torch.zeros(4, dtype=torch.int64)

    for number in range(4):
        uploads.add(np.full(4, number), target)
        uploads.send()

    assert log == [
        *("wait for a", "record a", "wait for b", "record b"),
        *("wait for a", "record a", "wait for b", "record b"),
    ]

"""What counts as a hang: silence, standing still, one endless step; and what does not."""

import pytest

from loraplex.engine.config import HangLimits
from loraplex.engine.process.hang_detector import HangDetector
from loraplex.engine.process.heartbeat import Beat, Phase

LIMITS = HangLimits(hang_timeout=10, step_timeout=100)


class Engine:
    """One second is one beat, where it beats, and one tick."""

    def __init__(self) -> None:
        self.detector = HangDetector(LIMITS, tick=1.0)
        self.verdicts: list[str] = []
        self._spell = 0

    def live(self, phase: Phase, seconds: int, *, busy: bool = False, spells: int = 1) -> None:
        """Stays in a phase; a number of spells one after another."""
        for _ in range(spells):
            self._spell += 1
            for second in range(seconds):
                self.detector.note(Beat(phase, self._spell, float(second), busy))
                self._tick()

    def be_silent(self, seconds: int) -> None:
        for _ in range(seconds):
            self._tick()

    def _tick(self) -> None:
        if (reason := self.detector.tick()) is not None:
            self.verdicts.append(reason)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_long_start_is_no_hang(engine: Engine) -> None:
    engine.live(Phase.START, 1000)
    engine.live(Phase.START, 50)
    engine.be_silent(90)

    assert engine.verdicts == []


def test_waiting_and_working_for_hours_is_no_hang(engine: Engine) -> None:
    engine.live(Phase.WAIT, 1, spells=5000)
    engine.live(Phase.WORK, 3, busy=False, spells=1000)

    assert engine.verdicts == []
    assert engine.detector.is_responsive


def test_a_long_step_that_computes_is_no_hang(engine: Engine) -> None:
    engine.live(Phase.WORK, 100, busy=True)

    assert engine.verdicts == []
    assert engine.detector.is_responsive


def test_silence_is_a_hang(engine: Engine) -> None:
    engine.live(Phase.WAIT, 1)

    engine.be_silent(9)
    assert not engine.detector.is_responsive

    engine.be_silent(1)
    assert engine.verdicts == ["it has given no sign of life for 11 s"]


@pytest.mark.parametrize("phase", [Phase.WAIT, Phase.WORK])
def test_standing_still_is_a_hang(engine: Engine, phase: Phase) -> None:
    engine.live(phase, 12)

    assert engine.verdicts == ["it has stood still for 11 s"]


def test_standing_still_counts_from_the_last_computing_on(engine: Engine) -> None:
    engine.live(Phase.WORK, 50, busy=True)
    engine.live(Phase.WORK, 11)

    assert engine.verdicts == []


def test_an_endless_step_is_a_hang(engine: Engine) -> None:
    engine.live(Phase.WORK, 102, busy=True)

    assert engine.verdicts == ["one step has taken 101 s"]


def test_saving_the_cache_at_the_end_is_no_hang(engine: Engine) -> None:
    engine.live(Phase.END, 90)

    assert engine.verdicts == []


def test_a_supervisor_that_was_stopped_itself_does_not_blame_the_engine(engine: Engine) -> None:
    engine.live(Phase.WAIT, 1)
    engine.be_silent(1)  # hours by the clock, one tick

    assert engine.verdicts == []

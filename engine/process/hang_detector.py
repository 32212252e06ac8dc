"""HangDetector: decides from its heartbeats whether an engine process hangs. Torch-free."""

from loraplex.engine.config import HangLimits
from loraplex.engine.process.heartbeat import Beat, Phase

LEAST_DOUBT = 2.0  # seconds without progress that say nothing yet: the machine may be busy


class HangDetector:
    """Measures silence by its own ticks and not by the clock: where the supervisor itself was
    stopped, as with the lid of a laptop, the engine is not to blame.

    Args:
        tick: seconds between two calls of `tick`.
    """

    def __init__(self, limits: HangLimits, tick: float) -> None:
        self._limits = limits
        self._tick = tick
        self._silent = 0.0  # seconds without a beat
        self._idle = 0.0  # seconds in one phase, and not busy
        self._beat = Beat(Phase.START, 0, 0.0, True)

    @property
    def is_responsive(self) -> bool:
        """Returns whether no sign of a hang has been seen."""
        first_doubt = max(LEAST_DOUBT, self._limits.hang_timeout / 3)
        return max(self._silent, self._idle) <= first_doubt

    def note(self, beat: Beat) -> None:
        """Records a sign of life."""
        is_still = beat.spell == self._beat.spell and not beat.is_busy
        self._idle = self._idle + beat.seconds - self._beat.seconds if is_still else 0.0
        self._beat, self._silent = beat, 0.0

    def tick(self) -> str | None:
        """Counts a tick; to be called at regular intervals.

        Returns:
            why the engine is taken for hung; None while it is not.
        """
        self._silent += self._tick
        limits, is_serving = self._limits, self._beat.phase in (Phase.WAIT, Phase.WORK)
        if self._silent > (limits.hang_timeout if is_serving else limits.step_timeout):
            return f"it has given no sign of life for {self._silent:.0f} s"
        if is_serving and self._idle > limits.hang_timeout:
            return f"it has stood still for {self._idle:.0f} s"
        if is_serving and self._beat.seconds > limits.step_timeout:
            return f"one step has taken {self._beat.seconds:.0f} s"
        return None

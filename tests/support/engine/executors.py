"""Executors without threads: what is submitted is done when a test says so, not by luck."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class OnDemand:
    """Does its tasks in their order, as many as it is told to."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((future, lambda: function(*args, **options)))
        return future

    def work(self, num_tasks: int = 1) -> None:
        for _ in range(min(num_tasks, len(self._tasks))):
            future, task = self._tasks.popleft()
            try:
                future.set_result(task())
            except Exception as error:  # whatever it is, it is the task's outcome
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._tasks.clear()
        self.work(len(self._tasks))


class AtOnce(OnDemand):
    """Does each task before `submit` returns."""

    def submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        future = super().submit(function, *args, **options)
        self.work()
        return future

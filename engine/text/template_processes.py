"""TemplateProcesses: runs chat templates in processes that can be ended, whatever they do.

A template is a program, and it may be a tenant's. In a process of its own it is ended by the system
beyond its time, fails beyond its memory, and finds no secret in its environment.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection

from loraplex.engine.errors import PromptRejected, UnsupportedModel
from loraplex.engine.text.chat_template import Chat
from loraplex.engine.text.template_worker import BROKEN, REFUSED

COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.text.template_worker")
MAX_SECONDS = 60  # for an answer that waits for a core; its own time is counted by the process
TRIES = 2  # a process may have ended between two chats
OVER_TIME = -signal.SIGPROF


class TemplateProcesses:
    """Keeps as many processes as chats are rendered at once; each is reused.

    `render` and `check` may be called from several threads.
    """

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._is_closed = False
        weakref.finalize(self, _end_all, self._idle)

    def render(self, source: str, chat: Chat) -> str:
        """Renders a chat. Raises PromptRejected where the template refuses it or exceeds its
        limits."""
        return self._ask(source, chat)

    def check(self, source: str) -> None:
        """Checks a template. Raises UnsupportedModel where the text is none."""
        self._ask(source, None)

    def close(self) -> None:
        """Ends the processes: idle ones now, each other one after its chat."""
        self._is_closed = True
        _end_all(self._idle)

    def _ask(self, source: str, chat: Chat | None) -> str:
        question = pickle.dumps((source, chat))
        status = 0
        for _ in range(TRIES):
            process = self._take()
            try:
                reply = process.ask(question)
            except (EOFError, OSError):
                status = process.end()
                if status == OVER_TIME:
                    break
            except BaseException:
                process.end()
                raise
            else:
                self._give_back(process)
                return _text_of(reply)
        what = "needs too much time" if status == OVER_TIME else "cannot be run"
        raise PromptRejected(f"The chat template {what} for these messages.")

    def _give_back(self, process: "_Process") -> None:
        self._idle.append(process)
        if self._is_closed:
            _end_all(self._idle)

    def _take(self) -> "_Process":
        try:
            return self._idle.pop()
        except IndexError:
            return _Process()


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C lets answers under way finish
            )
        self._connection = Connection(ours.detach())

    def ask(self, question: bytes) -> bytes:
        """Sends a chat. Raises EOFError or OSError if the process ends meanwhile or does not
        answer."""
        self._connection.send_bytes(question)
        if not self._connection.poll(MAX_SECONDS):
            raise EOFError
        return self._connection.recv_bytes()

    def end(self) -> int:
        """Ends the process and returns its exit status."""
        self._connection.close()
        self._process.kill()
        return self._process.wait()


def _end_all(idle: list[_Process]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            idle.pop().end()


def _text_of(reply: bytes) -> str:
    kind, text = reply[:1], reply[1:].decode("utf-8", "surrogatepass")
    if kind == REFUSED:
        raise PromptRejected(text)
    if kind == BROKEN:
        raise UnsupportedModel(f"The chat template is broken: {text}")
    return text

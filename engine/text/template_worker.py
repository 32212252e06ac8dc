"""The process that runs chat templates: one chat after another, within limits of its own.

It imports little, since it is started anew whenever a template exceeds them.
"""

import pickle
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing.connection import Connection

from loraplex.engine.text.chat_template import Chat, ChatTemplate, TemplateBroken, TemplateRefused

CPU_SECONDS = 1.0  # for one chat; an honest template takes some milliseconds
MEMORY = 512 << 20  # bytes of address space
MAX_TEXT = 16 << 20  # characters of one prompt; more than any context holds
MAX_TEMPLATES = 64  # compiled ones that are kept

RENDERED, REFUSED, BROKEN = b"t", b"r", b"b"  # the first byte of an answer; the rest is text

_compile = lru_cache(MAX_TEMPLATES)(ChatTemplate)


def answer(question: bytes) -> bytes:
    """Renders a template's chat; without a chat, only compiles the template."""
    try:
        kind, text = RENDERED, _render(*pickle.loads(question))
    except TemplateBroken as error:
        kind, text = BROKEN, str(error)
    except TemplateRefused as error:
        kind, text = REFUSED, str(error)
    except (MemoryError, RecursionError):
        kind, text = REFUSED, "The chat template needs too much memory for these messages."
    return kind + text.encode("utf-8", "surrogatepass")


def _render(source: str, chat: Chat | None) -> str:
    template = _compile(source)
    text = "" if chat is None else template.render(chat)
    if len(text) > MAX_TEXT:
        raise TemplateRefused(
            f"The chat template writes {len(text)} characters; a prompt may have {MAX_TEXT}."
        )
    return text


def main() -> None:
    """Serves until its parent ends. Beyond its time, the system ends it (SIGPROF)."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    with Connection(int(sys.argv[1])) as parent:
        while True:
            try:
                question = parent.recv_bytes()
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            found = answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            parent.send_bytes(found)


if __name__ == "__main__":
    main()

"""A spare engine process: it has imported its libraries, and waits to be needed. Torch-free."""

import os
import sys
import threading
from collections.abc import Callable

SPARE = "spare"  # the argument that makes an engine process one
READY = b"ready\n"  # what it writes to its standard output once it has imported all
START = b"start\n"  # what is written to its standard input when it is needed
LOWEST_PRIORITY = 19


def wait_until_needed(import_libraries: Callable[[], object]) -> bool:
    """Imports on a thread of the lowest priority, so that the engine that serves keeps the
    processors, and returns when this process is to take that engine's place.

    Returns:
        False where it will not be needed, since its supervisor has gone; or cannot be used, since
        an import failed.
    """
    imported = threading.Event()

    def import_quietly() -> None:
        if sys.platform == "linux":  # where each thread has a priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        import_libraries()
        imported.set()

    imports = threading.Thread(target=import_quietly, name="imports")
    imports.start()
    imports.join()  # two threads that import the same at once could see half a module
    if not imported.is_set():
        return False
    os.write(sys.stdout.fileno(), READY)
    return sys.stdin.buffer.readline() == START

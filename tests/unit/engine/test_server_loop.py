"""The loop of the engine's process: commands and steps in turn."""

import os
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import zmq

from loraplex.engine.process.heartbeat import Heartbeat
from loraplex.engine.protocol import AbortRequest
from loraplex.engine.server import COMMAND_SECONDS, EngineServer
from loraplex.engine.server_socket import ServerSocket

ABORTS, SECONDS_EACH = 300, 1e-3


class BusyEngine:
    """Always has work, and needs a millisecond for an abort."""

    has_work = is_waiting = True

    def __init__(self) -> None:
        self.done: list[str] = []

    def submit(self, command: AbortRequest) -> list[Any]:
        time.sleep(SECONDS_EACH)
        self.done.append("abort")
        return []

    def step(self) -> list[Any]:
        self.done.append("step")
        return []


def test_steps_go_on_between_very_many_aborts(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    socket, context = ServerSocket(address), zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(address)
    for number in range(ABORTS):
        client.send(msgspec.msgpack.encode(AbortRequest(f"{number}")))
    engine: Any = BusyEngine()
    reader, writer = os.pipe()
    server = EngineServer(engine, socket, os.getppid(), Heartbeat(writer))

    deadline = time.monotonic() + 10
    while engine.done.count("abort") < ABORTS and time.monotonic() < deadline:
        server._loop_once()

    runs = [len(list(run)) for kind, run in groupby(engine.done) if kind == "abort"]
    assert sum(runs) == ABORTS
    assert max(runs) <= COMMAND_SECONDS / SECONDS_EACH + 1
    client.close(linger=0)
    context.term()
    socket.close()
    os.close(reader)

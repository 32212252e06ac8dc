"""One small model with two adapters, served once for all tests that leave the server alive."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from support.models.adapters import write_adapter
from support.models.architectures import write_checkpoint
from support.server import Server, running_server

MAX_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, "llama", max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of different ranks and modules, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    modules = {"red": ["q_proj", "v_proj"], "blue": ["gate_proj", "down_proj", "o_proj"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        return {
            name: write_adapter(
                model_folder, folder / name, seed=seed, r=4 * seed, target_modules=targets
            )
            for seed, (name, targets) in enumerate(modules.items(), start=1)
        }


@pytest.fixture(scope="session")
def serve_options(model_folder: Path, adapters: dict[str, Path]) -> list[str]:
    """What `loraplex serve` is given."""
    named = [f"--adapter={name}={folder}" for name, folder in adapters.items()]
    return [
        f"--model={model_folder}",
        "--num-threads=1",
        "--kv-cache-memory=32MiB",
        "--max-num-seqs=16",
        *named,
    ]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, serve_options: list[str]) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("home"), *serve_options) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client

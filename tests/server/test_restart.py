"""What a server has cached when it is stopped, it finds when it starts again."""

from pathlib import Path

import pytest
from support.server import Server, running_server

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox jumps over the lazy dog, again and again and again. " * 4


def cached_tokens(server: Server) -> int:
    with server.client() as client:
        usage = client.completions.create(model="base", prompt=PROMPT, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_a_prompt_is_cached_after_a_restart(tmp_path: Path, model_folder: Path) -> None:
    options = [f"--model={model_folder}", "--served-model-name=base", "--num-threads=1"]
    options += ["--kv-cache-memory=32MiB", "--offload-disk=64MiB"]
    with running_server(tmp_path, *options) as server:
        cold = cached_tokens(server)

    with running_server(tmp_path, *options) as server:
        warm = cached_tokens(server)

    assert (cold, warm > 100) == (0, True)

"""Small engines for tests of what is shared, on a module's own `model` where it has one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.engines import make_engine
from support.models.architectures import write_checkpoint

from loraplex.engine.llm_engine import LLMEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "gemma3_text")


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[LLMEngine]:
    engine = make_engine(model, tmp_path / "store", kernels="naive")
    yield engine
    engine.close()


@pytest.fixture
def cold(model: Path, tmp_path: Path) -> Iterator[LLMEngine]:
    """An engine without base prompts."""
    engine = make_engine(model, tmp_path / "store", kernels="naive", max_num_batched_tokens=64)
    yield engine
    engine.close()

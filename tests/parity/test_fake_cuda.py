"""Every architecture on a GPU that is not there: nothing mixes what is on it with the host's.

The whole engine runs: assembly, recorded steps and others, adapters, every way of sampling, and
offloading.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.engines import Choice, make_engine, register, request, run
from support.kernels.fake_cuda import CUDA, fake_cuda, move_to_cuda
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import ARCHITECTURES, write_checkpoint

from loraplex.engine.build import engine as assembly
from loraplex.engine.config import EngineConfig
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.model.loader import LoadedModel, load_model

pytestmark = PEFT_NOISE

PROMPT = [5, 6, 7, 8, 9, 10, 11]
LENGTH = 6


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapter")
    return write_adapter(folder, out, r=4, target_modules=r".*\.(qkv_proj|q_proj|v_proj|o_proj)")


def load_on_fake_cuda(config: EngineConfig) -> LoadedModel:
    loaded = load_model(config)
    move_to_cuda(loaded.model)
    return replace(loaded, device=CUDA)


def start(folder: Path, store: Path) -> LLMEngine:
    return make_engine(
        folder,
        store,
        kernels="triton",
        dtype="bfloat16",
        offload_memory=1 << 20,
        kv_cache_memory=None,
    )


def serve(engine: LLMEngine, adapter: Path) -> dict[str, list[Choice]]:
    """Requests of all kinds, in batches of several."""
    ref = register(engine, adapter).ref
    requests = [
        request(PROMPT, "greedy", max_tokens=LENGTH, logprobs=2, prompt_logprobs=1),
        request(PROMPT, "adapter", max_tokens=LENGTH, adapter=ref),
        request(PROMPT, "forks", max_tokens=LENGTH, temperature=0.8, n=2, top_p=0.9, seed=1),
        request(
            PROMPT * 5,
            "changed",
            max_tokens=LENGTH,
            temperature=1.0,
            top_k=5,
            min_p=0.1,
            logit_bias={7: 1.0},
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            min_tokens=2,
        ),
    ]
    return run(engine, requests)


def test_no_step_mixes_devices_and_none_is_the_first_to_need_a_kernel(
    folder: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "load_model", load_on_fake_cuda)

    with fake_cuda(monkeypatch) as runtime:
        engine = start(folder, tmp_path / "store")
        built = set(runtime.binaries)
        results = serve(engine, adapter)
        replayed, described = engine.stats().num_replayed_steps, engine.info.recorded_steps
        engine.close()

    lengths = {name: [len(c.token_ids) for c in choices] for name, choices in results.items()}
    assert lengths == {
        "greedy": [LENGTH],
        "adapter": [LENGTH],
        "forks": [LENGTH, LENGTH],
        "changed": [LENGTH],
    }
    assert described == "8 of 8 CUDA graphs"  # for 1, 2, 4 and 8 rows
    assert replayed > 0
    assert runtime.binaries - built == set()

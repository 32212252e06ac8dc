"""Scores the example adapters in the engine, with and without eight-bit weights.

    python -m examples.quantization

Writes the scores to quantization.json: the questions and measures of each adapter's evaluation,
greedy, in bfloat16.
"""

import json
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from examples.evaluation import MAX_NEW_TOKENS, Score, mean_scores
from examples.example import Example
from examples.prepare_model import default_folder
from examples.training import ADAPTERS, prompt_text

from loraplex.adapters.manifest import AdapterRef, Folder
from loraplex.engine.config import QUANTIZATIONS, EngineConfig
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    AdapterRegistered,
    Event,
    GenerateRequest,
    RegisterAdapter,
    TokenEvent,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.chat_template import DEFAULT_STOP
from loraplex.engine.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "quantization.json"
NAMES = ("support", "json", "sql")


def main() -> None:
    scores = {quantization: _scores(quantization) for quantization in QUANTIZATIONS}
    RESULTS.write_text(json.dumps(scores, indent=2) + "\n")
    print(RESULTS.read_text())


def _scores(quantization: str) -> dict[str, dict[str, float]]:
    tokenizer = Tokenizer.from_folder(default_folder())
    with tempfile.TemporaryDirectory() as store:
        engine = LLMEngine.load(
            EngineConfig(
                model=str(default_folder()),
                adapter_store=store,
                dtype="bfloat16",
                kv_cache_memory=1 << 28,
                max_model_len=2048,
                max_num_seqs=16,
                num_threads=1,
                quantization=quantization,
            )
        )
        return {name: _score(engine, tokenizer, name) for name in NAMES}


def _score(engine: LLMEngine, tokenizer: Tokenizer, name: str) -> dict[str, float]:
    generate: Callable[[str, int], list[Example]] = import_module(f"examples.{name}.data").generate
    score: Score = import_module(f"examples.{name}.scoring").score
    examples = generate("heldout", import_module(f"examples.{name}.evaluate").HELDOUT)
    adapter = _register(engine, name)
    for index, example in enumerate(examples):
        engine.add(_request(str(index), tokenizer, example, adapter))
    answers = [""] * len(examples)
    for event in _run(engine):
        if isinstance(event, TokenEvent):
            answers[int(event.request_id)] += event.text
    return mean_scores(examples, answers, score)


def _request(
    request_id: str, tokenizer: Tokenizer, example: Example, adapter: AdapterRef
) -> GenerateRequest:
    prompt = tokenizer.encode(prompt_text(tokenizer, example.question), add_special_tokens=False)
    return GenerateRequest(
        request_id=request_id,
        tenant="examples",
        namespace="examples",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, stop=DEFAULT_STOP),
        adapter=adapter,
    )


def _register(engine: LLMEngine, name: str) -> AdapterRef:
    engine.submit(
        RegisterAdapter(
            request_id=name, tenant="examples", adapter_id=name, source=Folder(str(ADAPTERS / name))
        )
    )
    for event in _run(engine):
        if isinstance(event, AdapterRegistered):
            return event.info.ref
    raise RuntimeError(f"the engine did not take the adapter {name}")


def _run(engine: LLMEngine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work or engine.is_waiting:
        events += engine.step()
    return events


if __name__ == "__main__":
    main()

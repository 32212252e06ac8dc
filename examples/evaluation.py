"""Scores base model and adapter on the same held-out questions, by greedy decoding."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from examples.example import Example
from examples.prepare_model import default_folder
from examples.training import ADAPTERS, prompt_text
from peft import PeftModel
from rich.progress import track
from transformers import AutoModelForCausalLM

from loraplex.engine.text.chat_template import DEFAULT_STOP
from loraplex.engine.text.tokenizer import Tokenizer

Score = Callable[[Example, str], dict[str, float]]  # measure -> 0 ... 1, for one answer

BATCH_SIZE = 34
MAX_NEW_TOKENS = 72
SAMPLES = 3


def evaluate(name: str, examples: list[Example], score: Score) -> None:
    """Prints the means of both and writes them, with sample answers, to <name>/results.json."""
    torch.set_num_threads(1)
    folder = default_folder()
    tokenizer = Tokenizer.from_folder(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, ADAPTERS / name).eval()
    with model.disable_adapter():
        base_answers = _answers(model, tokenizer, examples, "base")
    adapter_answers = _answers(model, tokenizer, examples, name)
    results = {
        "questions": len(examples),
        "base": mean_scores(examples, base_answers, score),
        "adapter": mean_scores(examples, adapter_answers, score),
        "versions": {package: version(package) for package in ("torch", "transformers", "peft")},
        "samples": [
            {"question": example.question, "base": plain, "adapter": adapted}
            for example, plain, adapted in zip(
                examples[:SAMPLES], base_answers, adapter_answers, strict=False
            )
        ],
    }
    _print_misses(examples, adapter_answers, score)
    print(json.dumps({key: results[key] for key in ("questions", "base", "adapter")}))
    path = Path(__file__).parent / name / "results.json"
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def _answers(
    model: PeftModel, tokenizer: Tokenizer, examples: list[Example], label: str
) -> list[str]:
    answers: list[str] = []
    for start in track(range(0, len(examples), BATCH_SIZE), description=label):
        answers += _generate(model, tokenizer, examples[start : start + BATCH_SIZE])
    return answers


def _generate(model: PeftModel, tokenizer: Tokenizer, examples: list[Example]) -> list[str]:
    prompts = [
        tokenizer.encode(prompt_text(tokenizer, example.question), add_special_tokens=False)
        for example in examples
    ]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )
    return [_until_stop(tokenizer.decode(row[length:].tolist())) for row in output]


def _until_stop(text: str) -> str:
    for stop in DEFAULT_STOP:
        text = text.split(stop, maxsplit=1)[0]
    return text


def mean_scores(examples: list[Example], answers: list[str], score: Score) -> dict[str, float]:
    """Of each measure, over the answers to the examples."""
    scores = [score(example, answer) for example, answer in zip(examples, answers, strict=True)]
    return {
        measure: round(sum(each[measure] for each in scores) / len(scores), 3)
        for measure in scores[0]
    }


def _print_misses(examples: list[Example], answers: list[str], score: Score) -> None:
    for example, answer in zip(examples, answers, strict=True):
        if min(score(example, answer).values()) < 1:
            print(f"\n{example.question}\n  wanted: {example.answer!r}\n  got:    {answer!r}")

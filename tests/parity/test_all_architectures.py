"""Every causal language model of transformers is served exactly, or refused by name.

docs/architectures.md says which; this compares.
"""

import random
import re
from pathlib import Path

import pytest
import torch
from support.engine.engines import make_engine, request, run
from support.models.tiny_configs import MODEL_TYPES, VOCAB_SIZE, tiny_config
from support.models.tokenizers import write_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.engine.errors import StartRefused
from loraplex.engine.llm_engine import LLMEngine

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"
PROMPT_LENGTHS = (5, 20, 33)  # the sliding windows are of 8 tokens
TOLERANCE = 2e-4  # of a log-probability, float32
LARGEST = 20_000_000  # parameters; some classes cannot be made smaller by their config


def documented() -> dict[str, str]:
    """By model type, the first column of its row in the docs."""
    rows = re.findall(r"^\| (exact|refused|not tried) \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    return {name: kind for kind, cells in rows for name in re.findall(r"`([\w-]+)`", cells)}


def write_model(folder: Path, model_type: str) -> bool:
    """A small random checkpoint with a tokenizer; False: this class cannot be made small."""
    torch.manual_seed(0)
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        if size > LARGEST:
            return False
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _move_from_constants(model)
        model.save_pretrained(folder)
    except Exception:  # each class has checks of its own, made for sizes of its own
        return False
    write_tokenizer(folder, vocab_size=VOCAB_SIZE)
    return True


@torch.no_grad()
def _move_from_constants(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def largest_difference(engine: LLMEngine, folder: Path) -> float:
    """Of the log-probabilities of prompts and answers, to plain transformers."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    chooser = random.Random(7)
    prompts = [[chooser.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]
    asked = [
        request(prompt, str(i), max_tokens=6, logprobs=0, prompt_logprobs=0)
        for i, prompt in enumerate(prompts)
    ]
    answers = run(engine, asked)
    worst = 0.0
    for i, prompt in enumerate(prompts):
        answer = answers[str(i)][0]
        tokens = torch.tensor(prompt + answer.token_ids)
        with torch.no_grad():
            logits = reference(tokens[None], use_cache=False).logits[0]
        want = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        given = [p for p in answer.prompt_logprobs or [] if p is not None] + answer.logprobs
        got = torch.tensor([position.chosen.logprob for position in given])
        worst = max(worst, float((got - want).abs().max()))
    return worst


def outcome(tmp_path: Path, model_type: str) -> str:
    """What comes of serving it: "exact", "refused", "not tried" or by how much it is wrong."""
    if not write_model(tmp_path / "m", model_type):
        return "not tried"
    try:
        engine = make_engine(tmp_path / "m", tmp_path / "store", max_model_len=64)
    except StartRefused:
        return "refused"
    try:
        worst = largest_difference(engine, tmp_path / "m")
    finally:
        engine.close()
    return "exact" if worst <= TOLERANCE else f"wrong by {worst}"


@pytest.mark.filterwarnings("ignore")  # of classes that transformers itself is about to change
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_it_does_what_the_docs_say(tmp_path: Path, model_type: str) -> None:
    assert outcome(tmp_path, model_type) == documented().get(model_type)

"""Trains one LoRA adapter with PEFT, on one CPU core, from question and answer pairs."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from examples.example import Example
from examples.prepare_model import default_folder
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.engine.text.tokenizer import Tokenizer

BASE_MODEL = "google/gemma-3-270m"
ADAPTERS = Path(__file__).parent / "adapters"
GENERATION_PROMPT = "### Assistant:\n"
COMMON_TOKENS = 16_384  # Gemma's ids are in merge order: these are the most frequent ones
IGNORED = -100

Sequence = tuple[list[int], list[int]]  # token ids of the prompt and of the answer


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained. `invocation` makes it an activated LoRA: it acts from the last
    occurrence of that text on, and leaves the tokens before it to the base model."""

    name: str
    rank: int
    target_modules: tuple[str, ...]
    learning_rate: float
    steps: int
    batch_size: int = 8
    seed: int = 0
    invocation: str | None = None


@dataclass(frozen=True)
class Batch:
    """Sequences of several lengths, padded on the left so that their answers end together."""

    input_ids: Tensor  # [batch, length] int64
    attention_mask: Tensor  # [batch, length] int64, 0 where padded
    labels: Tensor  # [batch, longest answer] int64: the last input ids, IGNORED outside the answer


def train(recipe: Recipe, examples: list[Example], folder: Path | None = None) -> Path:
    """Trains on `examples`, in random order and as often as `steps` needs, and returns the
    adapter's folder: adapter_config.json and bf16 safetensors, as PEFT writes them."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)
    folder = folder or default_folder()
    tokenizer = Tokenizer.from_folder(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = [_tokens(tokenizer, base.config.eos_token_id, example) for example in examples]
    kept = _slim_head(base, [answer for _, answer in sequences])
    model = get_peft_model(base, _lora_config(recipe, tokenizer))
    _optimise(model, recipe, sequences, kept)
    return _save(model, ADAPTERS / recipe.name)


def prompt_text(tokenizer: Tokenizer, question: str) -> str:
    """The question as the server renders it: the model has no template, so the default one."""
    return tokenizer.render_chat([{"role": "user", "content": question}])


def _tokens(tokenizer: Tokenizer, eos: int, example: Example) -> Sequence:
    prompt = tokenizer.encode(prompt_text(tokenizer, example.question), add_special_tokens=False)
    return prompt, [*tokenizer.encode(example.answer, add_special_tokens=False), eos]


def _slim_head(model: PreTrainedModel, answers: list[list[int]]) -> Tensor:
    """Keeps the output head's rows of the common tokens and of the answers' own: the whole
    vocabulary of 262,144 would be most of a step's cost. Returns their ids, sorted."""
    used = torch.tensor([token for answer in answers for token in answer])
    kept = torch.cat([torch.arange(COMMON_TOKENS), used]).unique()
    head = nn.Linear(model.config.hidden_size, len(kept), bias=False)
    head.weight = nn.Parameter(model.get_output_embeddings().weight.detach()[kept])
    model.lm_head = head
    return kept


def _lora_config(recipe: Recipe, tokenizer: Tokenizer) -> LoraConfig:
    invocation = recipe.invocation and tokenizer.encode(recipe.invocation, add_special_tokens=False)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=list(recipe.target_modules),
        alora_invocation_tokens=invocation,
    )


def _optimise(
    model: PeftModel,
    recipe: Recipe,
    sequences: list[Sequence],
    kept: Tensor,
) -> None:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    order = _draw(sequences, recipe)
    started = time.monotonic()
    for step in range(recipe.steps):
        loss = _loss(model, _batch([next(order) for _ in range(recipe.batch_size)]), kept)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == recipe.steps - 1:
            elapsed = time.monotonic() - started
            print(
                f"{recipe.name}: step {step}, loss {loss.item():.3f}, {elapsed:.0f} s", flush=True
            )


def _draw(sequences: list[Sequence], recipe: Recipe) -> Iterator[Sequence]:
    random = Random(recipe.seed)
    while True:
        yield from random.sample(sequences, len(sequences))


def _batch(sequences: list[Sequence]) -> Batch:
    length = max(len(prompt) + len(answer) for prompt, answer in sequences)
    longest = max(len(answer) for _, answer in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    labels = torch.full((len(sequences), longest), IGNORED)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(sequences):
        tokens = torch.tensor(prompt + answer)
        ids[row, -len(tokens) :] = tokens
        mask[row, -len(tokens) :] = 1
        labels[row, -len(answer) :] = tokens[-len(answer) :]
    return Batch(ids, mask, labels)


def _loss(model: PeftModel, batch: Batch, kept: Tensor) -> Tensor:
    longest = batch.labels.shape[1]
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        logits_to_keep=longest + 1,
    ).logits[:, :-1]  # [batch, longest answer, kept]: each one predicts the token after it
    targets = torch.searchsorted(kept, batch.labels.clamp(min=0))
    targets[batch.labels == IGNORED] = IGNORED
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )


def _save(model: PeftModel, folder: Path) -> Path:
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.bfloat16()
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's form, left empty
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder

"""PEFT's mixed batch: transformers' `generate` with `adapter_names`, a static batch, in process.

    python benchmarks/peers/peft_mixed.py MODEL ADAPTERS [--cases TEXT …] [--quick]

The standard workload of benchmarks/serving, eight prompts at once where a server has eight requests
in flight. No HTTP, no queue, no cache: what a user of PEFT alone has. One JSON line per case.
"""

import argparse
import json
import random
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

BATCH = 8
NAMES = [f"a{index:03d}" for index in range(BATCH - 1)]


def load(model: Path, adapters: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    base.generation_config.eos_token_id = None
    options = {"autocast_adapter_dtype": False}
    peft = PeftModel.from_pretrained(base, adapters / NAMES[0], adapter_name=NAMES[0], **options)
    for name in NAMES[1:]:
        peft.load_adapter(adapters / name, adapter_name=name, **options)
    peft.set_adapter(NAMES[0])
    return peft.eval()


def random_prompts(shared: int, unique: int, vocab: int) -> torch.Tensor:
    rng = random.Random(0)
    start = [rng.randrange(10, vocab) for _ in range(shared)]
    rows = [start + [rng.randrange(10, vocab) for _ in range(unique)] for _ in range(BATCH)]
    return torch.tensor(rows)


def seconds(model: PeftModel, batch: torch.Tensor, new_tokens: int, names: list[str]) -> float:
    """Of one `generate` call; `names` has one adapter per row, or is empty for the active one."""
    start = time.perf_counter()
    model.generate(
        input_ids=batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **({"adapter_names": names} if names else {}),
    )
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path, help="where a000, a001, … are")
    parser.add_argument("--cases", nargs="+", default=[""])
    parser.add_argument("--quick", action="store_true", help="prove that everything runs")
    options = parser.parse_args()
    shared, unique, output = (32, 5, 4) if options.quick else (256, 64, 64)
    model = load(options.model, options.adapters)
    prompts = random_prompts(shared, unique, min(32000, model.config.vocab_size))

    cases = (
        ("base c1", 1, model.disable_adapter, []),
        ("base c8", BATCH, model.disable_adapter, []),
        ("one adapter c8", BATCH, nullcontext, []),
        ("base + 8 adapters c8", BATCH, nullcontext, ["__base__", *NAMES]),  # base + 7: one batch
    )
    for label, rows, context, names in cases:
        if not any(text in label for text in options.cases):
            continue
        with context():
            seconds(model, prompts[:rows], 2, names)
            prefill = seconds(model, prompts[:rows], 1, names)
            wall = seconds(model, prompts[:rows], output, names)
        record = {
            "label": label,
            "requests": rows,
            "prompt": shared + unique,
            "output": output,
            "wall_s": round(wall, 2),
            "output_tok_s": round(rows * output / wall, 1),
            "prefill_s": round(prefill, 3),
            "itl_mean_ms": round(1000 * (wall - prefill) / (output - 1), 1),
            "errors": 0,
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()

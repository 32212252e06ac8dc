"""The same prompts through transformers and PEFT."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from gpu.case import Machine
from peft import PeftModel
from transformers import AutoModelForCausalLM


class Peft:
    """A model with adapters loaded as PEFT does it; rows of a batch may have different ones."""

    def __init__(
        self, model: Path, adapters: Sequence[Path], dtype: torch.dtype, machine: Machine
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(machine.device)
        base.generation_config.eos_token_id = None
        options = {"autocast_adapter_dtype": False}
        first, *others = adapters
        self._model = PeftModel.from_pretrained(base, first, adapter_name=first.name, **options)
        for folder in others:
            self._model.load_adapter(folder, adapter_name=folder.name, **options)
        self._model.eval()
        self._device = machine.device

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], adapters: Sequence[str | None], new_tokens: int
    ) -> list[list[int]]:
        """Greedy tokens of prompts of one length, each with an adapter's name or None for the base.

        Rows are mixed only where they must be: PEFT is faster with one adapter for all, or none.
        """
        ids = torch.tensor(prompts, device=self._device)
        first, options = adapters[0], {}
        if len(set(adapters)) > 1:
            options["adapter_names"] = [name or "__base__" for name in adapters]
        elif first is not None:
            self._model.set_adapter(first)
        with self._model.disable_adapter() if set(adapters) == {None} else nullcontext():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=2,
                **options,
            )
        return out[:, ids.shape[1] :].tolist()

    def seconds(
        self, prompts: list[list[int]], adapters: Sequence[str | None], new_tokens: int
    ) -> float:
        """The lesser of two runs, after one that is not timed."""
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self.generate(prompts, adapters, new_tokens)
            times.append(time.perf_counter() - start)
        return min(times[1:])

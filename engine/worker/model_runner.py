"""ModelRunner: runs one step on the device, from its input to the sampled tokens."""

from typing import Protocol

import torch
from torch import Tensor

from loraplex.adapters.manifest import AdapterLoad
from loraplex.engine.kv.tiers import Transfers
from loraplex.engine.step import FlatStep, StepInput, StepOutput
from loraplex.engine.worker.forward import Forward
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.kv_cache import KVCache
from loraplex.engine.worker.sampler import Sampler


class RecordedSteps(Protocol):
    """Steps that can be replayed without the model's Python code.

    Attributes:
        description: what is recorded, and why something is not, for people.
    """

    description: str

    def run(self, step: FlatStep) -> Tensor | None:
        """Returns logits [R, V], valid until the next step; None where the step is not recorded."""

    def prepare(self) -> bool:
        """Records a step ahead of its first use.

        Returns:
            Whether there is more.
        """


class AdapterPlacer(Protocol):
    """Puts adapters into device slots."""

    def place(self, load: AdapterLoad) -> None:
        """Fills or empties a slot, in the order of the device's work."""


class ModelRunner:
    """Computes what the scheduler chose, by replay where possible."""

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        sampler: Sampler,
        adapters: AdapterPlacer,
        recorded: RecordedSteps | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        """
        Args:
            recorded: None: every step runs the model's own code.
            transfers: moves blocks between tiers; None: there is one tier.
        """
        self._forward = forward
        self._cache = cache
        self._sampler = sampler
        self._adapters = adapters
        self._recorded = recorded
        self._transfers = transfers
        self.num_replayed = 0  # steps

    @property
    def recorded_steps(self) -> str:
        """As `RecordedSteps.description`."""
        return self._recorded.description if self._recorded is not None else "none"

    def prepare(self) -> bool:
        """As `RecordedSteps.prepare`."""
        return self._recorded is not None and self._recorded.prepare()

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Places adapters, moves blocks, copies the shared blocks that are about to be written,
        computes and samples."""
        for load in step.adapter_loads:
            self._adapters.place(load)
        if self._transfers is not None:
            self._transfers.move(step.moves)
        self._cache.copy(step.copies)
        if not step.seq_ids:
            return StepOutput()
        logits = self._recorded.run(step.tokens) if self._recorded else None
        self.num_replayed += logits is not None
        if logits is None:
            forward = self._forward
            logits = forward(InputBatch.of(step.tokens, forward.device, forward.lora_capacity))
        return self._sampler.sample(logits, step.rows)

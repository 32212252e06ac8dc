"""ReferenceLogits: what plain transformers computes from a few tokens, before any replacement.

The last guard against serving a model wrongly, whatever the reason: one step of two sequences
through our forward pass must give these logits, up to rounding.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex.engine.errors import UnsupportedModel

NUM_SEQUENCES = 2
_LENGTH = 4  # tokens of each sequence, at most
_COMPARED = 2  # last rows of each sequence

_TOLERANCE = 2e-3  # relative distance of the logits' rows, in float32
_ROUNDED_TOLERANCE = 0.5
"""With fewer bits: Gemma 3 270M is at 0.05. What is computed wrongly is at about 1."""


@dataclass(frozen=True, eq=False)
class ReferenceLogits:
    token_ids: Tensor  # [NUM_SEQUENCES, length] int64
    logits: Tensor  # [NUM_SEQUENCES, rows, vocabulary] float32, of each sequence's last rows
    model_type: str
    dtype: torch.dtype

    @property
    def rows(self) -> list[int]:
        """Returns which of the flattened tokens have logits."""
        length, num_rows = self.token_ids.shape[1], self.logits.shape[1]
        ends = range(length, self.token_ids.numel() + 1, length)
        return [row for end in ends for row in range(end - num_rows, end)]

    def compare(self, logits: Tensor) -> None:
        """Compares our logits [R, vocabulary] of `rows` with these.

        Raises:
            UnsupportedModel: they are others.
        """
        want = self.logits
        got = logits.to(want).reshape(want.shape)
        distance = (got - want).norm(dim=-1)
        spread = (want - want.mean(-1, keepdim=True)).norm(dim=-1)
        # A sequence's median row: where experts are chosen, a rounding error can change one row.
        error = float((distance / spread.clamp(min=1e-6)).median(dim=1).values.max())
        if not error <= (_TOLERANCE if self.dtype == torch.float32 else _ROUNDED_TOLERANCE):
            raise UnsupportedModel(
                f"{self.model_type} is not supported: its logits here differ from those of "
                f"transformers by {error:.1%} of their spread"
            )


def dry_forward(model: PreTrainedModel, max_model_len: int) -> ReferenceLogits:
    """Runs the model as it is, with the attention that it is set to.

    Raises:
        UnsupportedModel: the model cannot run, or computes nothing finite.
    """
    length = min(_LENGTH, max_model_len)
    ids = _common_tokens(model, NUM_SEQUENCES * length).reshape(NUM_SEQUENCES, length)
    positions = torch.arange(length, device=model.device).expand_as(ids)
    rows = torch.arange(max(0, length - _COMPARED), length, device=model.device)
    try:
        output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever an unfamiliar model meets
        text = " ".join(str(error).split())
        raise UnsupportedModel(f"a forward pass fails: {text}") from error
    logits = output.logits.float()
    if logits.shape[1] != len(rows):
        raise UnsupportedModel("its forward pass gives logits for tokens that need none")
    if model.device.type != "meta" and (~torch.isfinite(logits)).any():
        raise UnsupportedModel("this checkpoint's logits are not finite")
    return ReferenceLogits(ids, logits, model.config.model_type, model.dtype)


def _common_tokens(model: PreTrainedModel, number: int) -> Tensor:
    """Returns common token ids [number] int64. A model computes with them as it does with text;
    with tokens that it never saw, such as special and unused ones, rounding errors grow large."""
    vocab_size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    first, step = vocab_size // 50, max(1, vocab_size // 263)
    return (first + step * torch.arange(number, device=model.device)) % vocab_size

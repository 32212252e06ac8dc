"""Limits: what the served model can take. The engine holds the same numbers."""

from dataclasses import dataclass

import msgspec

from loraplex.engine.protocol import EngineInfo
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.errors import Fault, InvalidRequest

MAX_CHOICES = 4096  # of one request, over all its prompts


@dataclass(frozen=True)
class Limits:
    max_model_len: int  # prompt and answer together, in tokens
    vocab_size: int

    @classmethod
    def of(cls, info: EngineInfo) -> "Limits":
        return cls(info.max_model_len, info.vocab_size)

    @staticmethod
    def check_choices(num_prompts: int, n: int) -> None:
        """Raises InvalidRequest for more choices than one request may ask for."""
        if num_prompts * n > MAX_CHOICES:
            raise InvalidRequest(
                f"A request may ask for {MAX_CHOICES} choices in all, but {num_prompts} prompts "
                f"with n = {n} are {num_prompts * n}.",
                "n",
            )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest for token ids that the model does not have."""
        named = {
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": tuple(sampling.logit_bias or ()),
        }
        faults = [
            Fault(param, f"{param}: {self._range_text(token_ids)}")
            for param, token_ids in named.items()
            if not self._are_tokens(token_ids)
        ]
        if faults:
            raise InvalidRequest.of(faults)

    def fit(
        self, param: str, token_ids: list[int], sampling: SamplingParams, default: int | None
    ) -> SamplingParams:
        """The sampling for one prompt, with `max_tokens` set where there is a default.

        Args:
            param: where the prompt came from, for the error.
            default: `max_tokens` of a request that names none; None: as many as fit.

        Raises:
            InvalidRequest: if the prompt is empty or has ids that are no tokens; with code
                context_length_exceeded if prompt and answer do not fit, with the numbers.
        """
        if not token_ids:
            raise InvalidRequest("The prompt has no tokens.", param)
        if not self._are_tokens(token_ids):
            raise InvalidRequest(f"{param}: {self._range_text(token_ids)}", param)
        room = self.max_model_len - len(token_ids)
        wanted = max(sampling.max_tokens or sampling.min_tokens, 1)
        if wanted > room:
            raise InvalidRequest(
                f"The model's maximum context length is {self.max_model_len} tokens, but this "
                f"request needs {len(token_ids) + wanted}: {len(token_ids)} in the {param}, "
                f"at least {wanted} in the answer.",
                param,
                "context_length_exceeded",
            )
        if sampling.max_tokens is not None or default is None:
            return sampling
        max_tokens = min(room, max(default, sampling.min_tokens))
        return msgspec.structs.replace(sampling, max_tokens=max_tokens)

    def _are_tokens(self, token_ids: list[int] | tuple[int, ...]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size)

    def _range_text(self, token_ids: list[int] | tuple[int, ...]) -> str:
        wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
        return f"token ids must be between 0 and {self.vocab_size - 1}, got {wrong}"

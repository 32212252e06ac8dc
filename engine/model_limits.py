"""ModelLimits: what the served model accepts of a prompt and a request. Torch-free.

The API checks against it before it sends a request to an engine, and the engine checks again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import EngineInfo, FailureCode
from loraplex.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class ModelLimits:
    max_model_len: int  # prompt and answer together, in tokens
    vocab_size: int
    max_num_seqs: int  # that run at once
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, info: EngineInfo) -> "ModelLimits":
        eos = frozenset(info.eos_token_ids)
        return cls(info.max_model_len, info.vocab_size, info.max_num_seqs, eos)

    def check_prompt(
        self, token_ids: Sequence[int], num_wanted: int = 1, *, what: str = "prompt", param: str
    ) -> None:
        """
        Args:
            num_wanted: tokens that the answer has at least.
            what: what the tokens are of, for the message.
            param: the field that they came in.

        Raises:
            RequestRejected: if there are none, if one is no token of the model, or if prompt and
                answer do not fit.
        """
        if not token_ids:
            raise _invalid(f"The {what} has no tokens.", param)
        if fault := self._range_fault(token_ids):
            raise _invalid(f"{param}: {fault}", param)
        length = len(token_ids)
        if length + num_wanted > self.max_model_len:
            raise RequestRejected(
                FailureCode.CONTEXT_LENGTH_EXCEEDED,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you "
                f"requested {length + num_wanted} tokens ({length} in the {what}, {num_wanted} in "
                f"the completion). Please reduce the length of the {what} or completion.",
                param,
            )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises RequestRejected with every fault, under the name of the first one's parameter."""
        faults = self.sampling_faults(sampling)
        if faults:
            messages = [message for _, message in faults]
            param = faults[0][0]
            raise RequestRejected(FailureCode.INVALID_REQUEST, "; ".join(messages), param, messages)

    def sampling_faults(self, sampling: SamplingParams) -> list[tuple[str, str]]:
        """Pairs of (parameter name, message)."""
        return list(self._sampling_faults(sampling))

    def _sampling_faults(self, sampling: SamplingParams) -> Iterator[tuple[str, str]]:
        if sampling.n > self.max_num_seqs:
            yield "n", f"n must be between 1 and {self.max_num_seqs}, got {sampling.n}"
        named: dict[str, Sequence[int]] = {
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": tuple(sampling.logit_bias or ()),
            "allowed_token_ids": sampling.allowed_token_ids or (),
        }
        for param, token_ids in named.items():
            if fault := self._range_fault(token_ids):
                yield param, f"{param}: {fault}"
        if sampling.restricts_tokens or sampling.min_tokens:
            yield from self._empty_faults(sampling)

    def _empty_faults(self, sampling: SamplingParams) -> Iterator[tuple[str, str]]:
        """Returns the faults of a request that samples no token."""
        allowed = set(sampling.allowed_token_ids or range(self.vocab_size))
        banned = {words[0] for words in sampling.bad_token_sequences if len(words) == 1}
        ending = set(sampling.stop_token_ids)
        ending |= set() if sampling.ignore_eos else self.eos_token_ids
        if not allowed - banned:
            param = "bad_words" if sampling.allowed_token_ids is None else "allowed_token_ids"
            yield param, f"{param}: with these no token is left to sample"
        elif sampling.min_tokens and not allowed - banned - ending:
            yield (
                "min_tokens",
                "min_tokens: all tokens that are allowed would end the answer before",
            )

    def _range_fault(self, token_ids: Sequence[int]) -> str | None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return None
        wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
        return f"token ids must be between 0 and {self.vocab_size - 1}, got {wrong}"


def _invalid(message: str, param: str) -> RequestRejected:
    return RequestRejected(FailureCode.INVALID_REQUEST, message, param)

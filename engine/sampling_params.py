"""SamplingParams: what a request asks of the sampler. Torch-free: built by the platform, applied by
the engine."""

from collections.abc import Iterator

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16  # of a caller's
MAX_STOPS = 32  # with those of a chat template
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_TOKENS_NAMED = 1024  # in logit_bias, in stop_token_ids: each costs time in every step
MAX_BAD_WORDS = 128
MAX_BAD_TOKENS = 1024  # of all bad words together, each in its two forms
MAX_REPETITION_PENALTY = 1e6
MIN_TEMPERATURE = 1e-5  # below, the most likely token takes all but nothing: greedy


class InvalidSamplingParams(ValueError):
    """Raised with every fault at once: pairs of (parameter name, message)."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(message for _, message in faults))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. Invalid values cannot be constructed.

    Raises:
        InvalidSamplingParams: on construction, naming every parameter at fault.
    """

    n: int = 1
    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0
    temperature: float = 1.0  # 0, and all below MIN_TEMPERATURE: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    seed: int | None = None
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()  # none of them is completed
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many alternatives; 0: only the chosen token's
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise InvalidSamplingParams(faults)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def restricts_tokens(self) -> bool:
        return self.allowed_token_ids is not None or bool(self.bad_token_sequences)

    def _faults(self) -> Iterator[tuple[str, str]]:
        for name, low, high in RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                yield name, f"{name} must be between {low} and {high}, got {value}"
        if not 0.0 < self.top_p <= 1.0:
            yield "top_p", f"top_p must be above 0 and at most 1, got {self.top_p}"
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            yield (
                "repetition_penalty",
                f"repetition_penalty must be above 0 and at most {MAX_REPETITION_PENALTY:g}, "
                f"got {self.repetition_penalty}",
            )
        if self.max_tokens is not None and 0 < self.max_tokens < self.min_tokens:
            yield (
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        yield from self._stop_faults()
        yield from self._bias_faults()
        yield from self._token_faults()

    def _stop_faults(self) -> Iterator[tuple[str, str]]:
        if len(self.stop) > MAX_STOPS:
            yield "stop", f"stop takes at most {MAX_STOPS} strings, got {len(self.stop)}"
        if any(not 0 < len(text) <= MAX_STOP_LENGTH for text in self.stop):
            yield "stop", f"each stop string must have 1 to {MAX_STOP_LENGTH} characters"
        if len(self.stop_token_ids) > MAX_TOKENS_NAMED:
            yield "stop_token_ids", f"stop_token_ids takes at most {MAX_TOKENS_NAMED} tokens"
        if not all(0 <= token <= MAX_COUNT for token in self.stop_token_ids):
            yield "stop_token_ids", f"stop_token_ids must be between 0 and {MAX_COUNT}"

    def _bias_faults(self) -> Iterator[tuple[str, str]]:
        biases = self.logit_bias or {}
        if len(biases) > MAX_TOKENS_NAMED:
            yield "logit_bias", f"logit_bias takes at most {MAX_TOKENS_NAMED} tokens"
        for token, bias in biases.items():
            if not (0 <= token <= MAX_COUNT and -100.0 <= bias <= 100.0):
                yield (
                    "logit_bias",
                    "logit_bias maps token ids to numbers between -100 and 100, "
                    f"got {token}: {bias}",
                )
                break

    def _token_faults(self) -> Iterator[tuple[str, str]]:
        allowed = self.allowed_token_ids
        if allowed is not None and not 0 < len(allowed) <= MAX_TOKENS_NAMED:
            yield (
                "allowed_token_ids",
                f"allowed_token_ids takes 1 to {MAX_TOKENS_NAMED} tokens, got {len(allowed)}",
            )
        if not all(0 <= token <= MAX_COUNT for token in allowed or ()):
            yield "allowed_token_ids", f"allowed_token_ids must be between 0 and {MAX_COUNT}"
        bad = self.bad_token_sequences
        if sum(map(len, bad)) > MAX_BAD_TOKENS:
            yield "bad_words", f"bad_words takes at most {MAX_BAD_TOKENS} tokens in all"
        if not all(words and all(0 <= t <= MAX_COUNT for t in words) for words in bad):
            yield "bad_words", "bad_words takes words of one or more tokens"


RANGES = (
    ("n", 1, MAX_CHOICES),
    ("max_tokens", 1, MAX_COUNT),
    ("min_tokens", 0, MAX_COUNT),
    ("temperature", 0.0, 2.0),
    ("top_k", -1, MAX_COUNT),
    ("min_p", 0.0, 1.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)

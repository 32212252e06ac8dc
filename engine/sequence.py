"""Sequence: the tokens and counters of one generation."""

from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.protocol import (
    BasePromptRef,
    FinishReason,
    GenerateRequest,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.step import Logprobs
from loraplex.engine.text.detokenizer import Detokenizer

_ids = count()
_SHARED_BY_CHOICES = (  # values that are never changed in place
    *("request_id", "tenant", "namespace", "adapter", "adapter_start", "frontier", "base_prompt"),
    *("output", "priority", "call", "turn", "arrival", "sampling", "seed", "max_len", "status"),
    *("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens", "added_at", "adapter_slot"),
    *("queue_seconds", "finish_reason", "stop_reason"),
)


@dataclass
class BlockKeys:
    """The keys of one sequence's full blocks, in two chains; `PrefixKeys` extends them."""

    base: list[bytes] = field(default_factory=list)  # as the base model fills the blocks
    adapted: list[bytes] = field(default_factory=list)  # as the sequence's adapter does
    num_public: int = 0  # leading blocks of `base` that everybody may share

    def copy(self) -> "BlockKeys":
        return BlockKeys(list(self.base), list(self.adapted), self.num_public)


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Output(Enum):
    """What a sequence is computed for."""

    GENERATE = "generate"  # tokens
    KEEP = "keep"  # its KV blocks, as a base prompt; nothing is sampled from it


class Sequence:
    """One choice of one request.

    A step computes tokens so that `num_computed_tokens` catches up with `num_tokens`; once it has,
    the next token is sampled. Prefill, decode and the return from preemption all follow from that.
    """

    def __init__(
        self,
        request: GenerateRequest,
        detokenizer: Detokenizer,
        *,
        seed: int,
        max_len: int,
        adapter_start: int = 0,
        frontier: int = 0,
    ) -> None:
        """
        Args:
            max_len: tokens in all at which it must end.
            adapter_start: the position from which its adapter acts.
            frontier: the layers below it store what the base model stores, adapter or not.
        """
        self.seq_id = next(_ids)
        self.request_id = request.request_id
        self.index = 0  # which of the n choices
        self.tenant = request.tenant
        self.namespace = request.namespace
        self.adapter: AdapterRef | None = request.adapter
        self.adapter_start = adapter_start
        self.frontier = frontier
        self.base_prompt: BasePromptRef | None = None  # that its tokens begin with
        self.output = Output.GENERATE
        self.priority = request.priority
        self.call = request.call_id  # whose prompts take turns with other calls; None: its own
        self.turn = 0  # set by the waiting queue
        self.arrival = self.seq_id
        self.sampling: SamplingParams = request.sampling
        self.seed = seed
        self.max_len = max_len
        self.detokenizer = detokenizer
        self.status = SequenceStatus.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # set by the scheduler at first admission
        self.num_preemptions = 0
        self.added_at = 0.0  # on the metering's clock; set by the scheduler
        self.queue_seconds = 0.0  # until its first admission; set by the scheduler
        self.block_keys = BlockKeys()  # of its full blocks; kept by the KV manager
        self.adapter_slot = -1  # set by the scheduler while it runs
        self.prompt_logprobs: list[Logprobs | None] | None = None  # [0] stays None
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.num_prompt_tokens
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        """Returns the number of tokens when all that it may generate is generated."""
        if self.sampling.max_tokens is None:
            return self.max_len
        return min(self.max_len, self.num_prompt_tokens + self.sampling.max_tokens)

    @property
    def num_rows(self) -> int:
        """Returns the rows that it stands for: n until it has forked into its choices."""
        return self.sampling.n if self.num_output_tokens == 0 else 1

    @property
    def order(self) -> tuple[int, int, int]:
        """Returns its place among its tenant's sequences: by priority (lower first), then by its
        call's turn, then first come, first served."""
        return self.priority, self.turn, self.arrival

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Returns whether the prompt must be computed in full, whatever is cached."""
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    def fork(self, index: int) -> "Sequence":
        """Returns another choice of the same request, at this very point, without blocks of its
        own."""
        child = object.__new__(Sequence)
        for name in _SHARED_BY_CHOICES:
            setattr(child, name, getattr(self, name))
        child.seq_id = next(_ids)
        child.index = index
        child.num_preemptions = 0
        child.token_ids = list(self.token_ids)
        child.block_keys = self.block_keys.copy()
        child.detokenizer = self.detokenizer.fork()
        child.prompt_logprobs = None
        return child

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

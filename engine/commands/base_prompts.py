"""BasePromptCommands: publishes and retires base prompts beside the running requests."""

from collections import Counter
from collections.abc import Iterable

import msgspec
from tokenizers import Tokenizer

from loraplex.engine.errors import RequestRejected
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.kv.pinned_prompts import PinnedPrompt
from loraplex.engine.kv.storage.groups import blocks_at_peak
from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.protocol import (
    BasePromptInfo,
    BasePromptPublished,
    BasePromptRef,
    BasePromptRetired,
    BasePromptStats,
    FailureCode,
    GenerateRequest,
    PublishBasePrompt,
    RequestFailed,
    RetireBasePrompt,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.scheduler import Scheduler, SequenceUpdate
from loraplex.engine.sequence import Output, Sequence
from loraplex.engine.text.detokenizer import Detokenizer

FIRST_OF_ALL = -(2**31)  # a priority
MAX_SHARE = 0.5  # of the KV pool that base prompts may keep together

Outcome = BasePromptPublished | BasePromptRetired | RequestFailed


class BasePromptCommands:
    """Computes base prompts with sequences of the operator's, and pins them until the last request
    that uses them has ended."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self._scheduler = scheduler
        self._prompts = scheduler.kv.prompts
        self._tokenizer = tokenizer
        self._limits = limits
        self._publishing: list[tuple[str, PinnedPrompt]] = []
        self._retiring: list[tuple[str, PinnedPrompt]] = []
        self._num_saved_tokens = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._publishing or self._retiring)

    def publish(self, command: PublishBasePrompt) -> None:
        """Starts to compute a prompt; the result comes out of `outcomes`.

        Raises:
            RequestRejected: it is no prompt, does not fit, or other tokens have its name.
        """
        ref = BasePromptRef(prompt_id=command.prompt_id, version=command.version)
        prompt = self._prompts.get(ref)
        if prompt is None:
            self._limits.check_prompt(command.token_ids, what="base prompt", param="token_ids")
            self._refuse_unaffordable(len(command.token_ids))
            sequence = self._sequence(command)
            prompt = self._prompts.add(ref, sequence)
            self._scheduler.add(sequence)
            self._reserve()
        elif prompt.token_ids != tuple(command.token_ids):
            raise _invalid(
                "this version of the base prompt has other tokens; publish a new version"
            )
        elif prompt.is_retired:
            raise _invalid("this version of the base prompt is being retired")
        self._publishing.append((command.request_id, prompt))

    def retire(self, command: RetireBasePrompt) -> None:
        """Withdraws a prompt from new requests; the result comes out of `outcomes`.

        Raises:
            RequestRejected: there is none of this name.
        """
        ref = BasePromptRef(prompt_id=command.prompt_id, version=command.version)
        prompt = self._find(ref)
        prompt.is_retired = True
        if not prompt.is_ready and not self._scheduler.registry.num_users(ref):
            self._scheduler.abort(prompt.sequence.request_id)
        self._retiring.append((command.request_id, prompt))

    def apply(
        self, request: GenerateRequest, default: BasePromptRef | None
    ) -> tuple[GenerateRequest, PinnedPrompt | None]:
        """Puts a base prompt before a request's tokens: the one that it names, otherwise its
        adapter's unless the tokens begin with it already; otherwise finds the one that the tokens
        begin with.

        Raises:
            RequestRejected: the base prompt is not published.
        """
        ref = request.base_prompt or default
        if ref is None:
            return request, self._prompts.beginning_of(request.prompt_token_ids)
        prompt = self._find(ref)
        if request.base_prompt or not prompt.is_beginning_of(request.prompt_token_ids):
            tokens = [*prompt.token_ids, *request.prompt_token_ids]
            request = msgspec.structs.replace(request, prompt_token_ids=tokens)
        return request, prompt

    def count(self, updates: Iterable[SequenceUpdate]) -> None:
        """Counts the tokens that a step gave out."""
        for update in updates:
            sequence = update.sequence
            if sequence.base_prompt is None or update.position or sequence.index:
                continue
            prompt = self._prompts.get(sequence.base_prompt)
            if prompt is not None:
                self._num_saved_tokens += min(prompt.num_tokens, sequence.num_cached_tokens or 0)

    def outcomes(self) -> list[Outcome]:
        """Returns the outcomes since the last call."""
        for prompt in list(self._prompts):
            if prompt.is_lost:
                self._forget(prompt)
            elif prompt.is_computed and not prompt.is_ready:
                self._scheduler.kv.pin(prompt)
        self._reserve()
        return [*self._published(), *self._retired()]

    def stats(self) -> list[BasePromptStats]:
        registry = self._scheduler.registry
        return [
            BasePromptStats(
                info=self._info(prompt),
                is_ready=prompt.is_ready,
                is_retired=prompt.is_retired,
                num_users=registry.num_users(prompt.ref),
                num_saved_blocks=self._num_saved_blocks(prompt),
            )
            for prompt in self._prompts
        ]

    @property
    def num_saved_tokens(self) -> int:
        return self._num_saved_tokens

    def _num_saved_blocks(self, prompt: PinnedPrompt) -> int:
        kv = self._scheduler.kv
        shared = set(kv.held_blocks(prompt.sequence))
        holders = Counter(
            block
            for sequence in self._scheduler.running
            if sequence.base_prompt == prompt.ref
            for block in kv.held_blocks(sequence)
            if block in shared
        )
        return sum(holders.values()) - len(holders)

    def _reserve(self) -> None:
        """Reserves the blocks that prompts still need to be computed, so that neither raised floors
        nor running sequences can take them."""
        kv, chunk = self._scheduler.kv, self._scheduler.limits.max_num_batched_tokens
        pending = [prompt for prompt in self._prompts if not prompt.is_ready]
        missing = 0
        for prompt in pending:
            paid = sum(block.account == OPERATOR for block in kv.held_blocks(prompt.sequence))
            missing += max(0, self._num_blocks(prompt.num_tokens, chunk) - paid)
        held = kv.pool.budgets.of(OPERATOR).held
        kv.pool.guarantee_operator(held + missing if pending else 0)

    def _published(self) -> list[Outcome]:
        done: list[Outcome] = []
        for item in list(self._publishing):
            request_id, prompt = item
            if not prompt.is_ready and not prompt.is_lost:
                continue
            self._publishing.remove(item)
            if prompt.is_ready:
                done.append(BasePromptPublished(request_id, self._info(prompt)))
            else:
                message = "The base prompt was given up before it was computed."
                code = FailureCode.BUDGET_EXCEEDED
                done.append(RequestFailed(request_id=request_id, code=code, message=message))
        return done

    def _retired(self) -> list[Outcome]:
        num_users = self._scheduler.registry.num_users
        unused = [item for item in self._retiring if not num_users(item[1].ref)]
        self._retiring = [item for item in self._retiring if num_users(item[1].ref)]
        for _, prompt in unused:
            self._forget(prompt)
        return [BasePromptRetired(request_id) for request_id, _ in unused]

    def _forget(self, prompt: PinnedPrompt) -> None:
        if self._prompts.get(prompt.ref) is not prompt:
            return
        kv = self._scheduler.kv
        self._scheduler.abort(prompt.sequence.request_id)
        blocks = kv.held_blocks(prompt.sequence)
        kv.free(prompt.sequence)
        self._prompts.remove(prompt)
        kv.pool.retire(b for b in blocks if b.key is not None and b.key[1] not in self._prompts)

    def _find(self, ref: BasePromptRef) -> PinnedPrompt:
        prompt = self._prompts.get(ref)
        if prompt is None or prompt.is_retired:
            code = FailureCode.BASE_PROMPT_NOT_FOUND
            message = "There is no base prompt of this name and version."
            raise RequestRejected(code, message, "base_prompt")
        return prompt

    def _info(self, prompt: PinnedPrompt) -> BasePromptInfo:
        num_blocks = self._scheduler.kv.num_held_blocks(prompt.sequence)
        return BasePromptInfo(ref=prompt.ref, num_tokens=prompt.num_tokens, num_blocks=num_blocks)

    def _sequence(self, command: PublishBasePrompt) -> Sequence:
        request = GenerateRequest(
            request_id=f"base prompt {command.request_id}",
            tenant=OPERATOR,
            namespace=OPERATOR,
            prompt_token_ids=command.token_ids,
            sampling=SamplingParams(),
            priority=FIRST_OF_ALL,
        )
        detokenizer = Detokenizer(self._tokenizer, [])
        sequence = Sequence(request, detokenizer, seed=0, max_len=self._limits.max_model_len)
        sequence.output = Output.KEEP
        return sequence

    def _refuse_unaffordable(self, num_tokens: int) -> None:
        pool, chunk = self._scheduler.kv.pool, self._scheduler.limits.max_num_batched_tokens
        taken = sum(self._num_blocks(prompt.num_tokens) for prompt in self._prompts)
        needed = self._num_blocks(num_tokens)
        only_meanwhile = self._num_blocks(num_tokens, chunk) - needed
        room = min(int(pool.num_blocks * MAX_SHARE), pool.budgets.limit(OPERATOR) - only_meanwhile)
        if taken + needed > room:
            raise RequestRejected(
                FailureCode.BUDGET_EXCEEDED,
                f"The base prompt keeps {needed} KV blocks, but base prompts may keep {room} of "
                f"{pool.num_blocks} and have {taken} already.",
                "token_ids",
            )

    def _num_blocks(self, num_tokens: int, chunk: int = 1) -> int:
        """Returns the blocks that a prompt keeps, or needs at most while it is computed in
        chunks."""
        kv = self._scheduler.kv
        return blocks_at_peak(kv.groups, kv.block_size, num_tokens, chunk)


def _invalid(message: str) -> RequestRejected:
    return RequestRejected(FailureCode.INVALID_REQUEST, message, "base_prompt")

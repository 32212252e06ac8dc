"""LLMEngine: requests in, events out, one step at a time."""

import logging
import os
import time
from collections.abc import Callable

import msgspec

from loraplex.adapters.activation import adapter_start
from loraplex.engine.build.engine import EngineParts, assemble
from loraplex.engine.commands.adapters import AdapterCommands
from loraplex.engine.commands.base_prompts import BasePromptCommands
from loraplex.engine.commands.block_map import block_map
from loraplex.engine.commands.shares import set_tenant_shares
from loraplex.engine.commands.stats import StepMetrics
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import INTERNAL_ERROR, RequestRejected
from loraplex.engine.kv.idle_check import IdleCheck
from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.protocol import (
    AbortRequest,
    EngineCommand,
    EngineInfo,
    EngineStats,
    Event,
    FailureCode,
    GenerateRequest,
    GetBlockMap,
    GetStats,
    PositionLogprobs,
    PublishBasePrompt,
    RegisterAdapter,
    RequestFailed,
    RetireBasePrompt,
    SetTenantShares,
    StartProgress,
    TokenEvent,
    UnregisterAdapter,
    Usage,
)
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.scheduling.resumption import resume
from loraplex.engine.scheduling.scheduler import SchedulerOutput, SequenceUpdate
from loraplex.engine.sequence import Sequence
from loraplex.engine.step import StepOutput
from loraplex.engine.text.detokenizer import Detokenizer
from loraplex.engine.text.token_text import TokenText

logger = logging.getLogger(__name__)

NO_MEMORY = "There is no memory left that this request could ever have."


class LLMEngine:
    """One model, its adapters and its KV pool. Not thread-safe: one loop drives it.

    A step is three calls: schedule, execute, update.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        self._parts = parts
        self._token_text = TokenText(parts.tokenizer)
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._seeds = RequestSeeds(config.seed)
        self._max_num_waiting = config.max_num_waiting
        self._metrics = StepMetrics()
        self._adapters = AdapterCommands(parts.lora)
        self._check = IdleCheck(parts.scheduler.kv)
        self.info = _describe(config, parts)
        self._limits = ModelLimits.of(self.info)
        self._base_prompts = BasePromptCommands(parts.scheduler, parts.tokenizer, self._limits)

    @classmethod
    def load(
        cls, config: EngineConfig, on_progress: Callable[[StartProgress], None] | None = None
    ) -> "LLMEngine":
        """Loads the model and allocates the KV cache.

        Raises:
            StartRefused: when the model or the settings cannot be served.
        """
        return cls(config, assemble(config, on_progress or (lambda progress: None)))

    @property
    def has_work(self) -> bool:
        """Returns whether a step now would compute something, as far as can be told without
        trying."""
        return bool(self._scheduler.running) or any(
            self._adapters.is_loaded(adapter)
            and not all(self._scheduler.kv.tiers.is_awaiting(s.seq_id) for s in queue)
            for (_, adapter), queue in self._scheduler.waiting.queues.items()
        )

    @property
    def is_waiting(self) -> bool:
        """Returns whether an outcome is due soon without another command: `step` must be called
        again."""
        return bool(self._scheduler.waiting) or self._adapters.is_busy or self._base_prompts.is_busy

    def submit(self, command: EngineCommand) -> list[Event]:  # noqa: C901 - a case a command
        """Executes a command; outcomes that take longer come out of `step`.

        Returns:
            what can be answered at once.

        Raises:
            RequestRejected: when it cannot be obeyed, with the reason. Then it changed nothing.
        """
        scheduler = self._scheduler
        match command:
            case GenerateRequest():
                self.add(command)
            case AbortRequest():
                self.abort(command.request_id)
            case RegisterAdapter():
                self._adapters.register(command)
            case UnregisterAdapter():
                self._adapters.unregister(command)
            case PublishBasePrompt():
                self._base_prompts.publish(command)
            case RetireBasePrompt():
                self._base_prompts.retire(command)
            case SetTenantShares():
                return [set_tenant_shares(scheduler, command)]
            case GetBlockMap():
                return [block_map(scheduler.kv.pool, command.request_id)]
            case GetStats():
                return [msgspec.structs.replace(self.stats(), request_id=command.request_id)]
        return []

    def add(self, request: GenerateRequest) -> None:
        """Accepts a request; its events come out of `step`.

        Raises:
            RequestRejected: when it cannot be served, with the reason.
        """
        terms = self._adapters.terms(request.adapter)
        request, prompt = self._base_prompts.apply(request, terms.base_prompt)
        if request.resume is None:  # else it had been accepted before
            self._refuse_too_many(request.tenant)
        sampling = request.sampling
        self._limits.check_prompt(request.prompt_token_ids, param="prompt")
        self._limits.check_sampling(sampling)
        sequence = Sequence(
            request,
            Detokenizer(
                self._parts.tokenizer,
                request.prompt_token_ids,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                skip_special_tokens=sampling.skip_special_tokens,
            ),
            seed=self._seeds.of(sampling),
            max_len=self.info.max_model_len,
            adapter_start=adapter_start(
                request.prompt_token_ids,
                terms.activation,
                terms.invocation_tokens,
                prompt.num_tokens if prompt else 0,
            ),
            frontier=terms.frontier,
        )
        sequence.base_prompt = prompt.ref if prompt else None
        self._fit(sequence)
        if request.adapter is not None:
            self._parts.lora.prepare(request.adapter)
        for choice in self._choices(sequence, request):
            self._scheduler.add(choice)

    def abort(self, request_id: str) -> None:
        """Ends a request and releases what it holds; no event follows. Unknown ids are ignored."""
        self._scheduler.abort(request_id)

    def step(self) -> list[Event]:
        """Computes one step and returns its events, with the outcomes of registrations."""
        failed = self._fail_unavailable()
        output = self._scheduler.schedule()
        failed += self._fail_impossible(output.impossible)
        start = time.perf_counter()
        result = self._runner.execute(output.step)
        seconds = time.perf_counter() - start
        self._parts.recompute.note(output.num_tokens, len(output.scheduled), seconds)
        updates = self._scheduler.update(output, result)
        self._metrics.count(output, updates, self._scheduler.kv)
        self._base_prompts.count(updates)
        events: list[Event] = [
            *failed,
            *self._token_events(updates),
            *self._fail_rows(output, result),
        ]
        in_use = self._scheduler.adapters_in_use
        return [*events, *self._adapters.outcomes(in_use), *self._base_prompts.outcomes()]

    def prepare(self) -> bool:
        """Does a piece of work that saves time later, and finally proves the books; to be called
        while the engine is idle.

        Returns:
            Whether there is more.

        Raises:
            RuntimeError: the books of KV memory do not balance; nothing should be served from it.
        """
        if self._runner.prepare() or self._parts.prefault.prepare():
            return True
        self._check.run()
        return False

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self._metrics.stats(self._scheduler, self._adapters.stats()),
            num_replayed_steps=self._runner.num_replayed,
            base_prompts=self._base_prompts.stats(),
            base_prompt_saved_tokens=self._base_prompts.num_saved_tokens,
        )

    def save_cache(self) -> None:
        """Writes cached blocks to the disk, where that is configured: the most useful first, for a
        few seconds. To be called before the end, when nothing runs any more."""
        kv = self._scheduler.kv
        kv.tiers.save(kv.pool.findable())

    def close(self) -> None:
        self._adapters.close()
        self._scheduler.kv.tiers.close()

    def _refuse_too_many(self, tenant: str) -> None:
        """Refuses a request beyond the limit on waiting ones. Running sequences count, too: after a
        restart they arrive again and wait."""
        most = self._max_num_waiting + self.info.max_num_seqs
        if self._scheduler.num_open(tenant) >= most:
            raise RequestRejected(
                FailureCode.QUEUE_FULL,
                f"{self._max_num_waiting} prompts of this tenant wait already; try again when some "
                "of them are done.",
            )

    def _fit(self, sequence: Sequence) -> None:
        """Refuses a request that its tenant's memory can never hold, and limits the length of
        others to what it can."""
        refusal = self._scheduler.admission.refusal(sequence)
        if refusal is not None:
            raise RequestRejected(FailureCode.BUDGET_EXCEEDED, refusal, "prompt")
        sequence.max_len = self._scheduler.admission.longest(sequence)

    def _choices(self, sequence: Sequence, request: GenerateRequest) -> list[Sequence]:
        """Returns the sequences to schedule: one, which forks; or the choices that another engine
        had begun."""
        if request.resume is None:
            return [sequence]
        return resume(sequence, request.resume, self._scheduler.stops, self.info.vocab_size)

    def _fail_impossible(self, sequences: list[Sequence]) -> list[RequestFailed]:
        """Ends waiting requests for which room can never be made."""
        failed: list[RequestFailed] = []
        for sequence in sequences:
            if not sequence.is_finished:
                message = self._scheduler.admission.refusal(sequence) or NO_MEMORY
                self._scheduler.abort(sequence.request_id)
                failed.append(
                    RequestFailed(
                        request_id=sequence.request_id,
                        code=FailureCode.BUDGET_EXCEEDED,
                        message=message,
                    )
                )
        return failed

    def _fail_unavailable(self) -> list[RequestFailed]:
        """Ends only the requests whose adapter could not be read."""
        failed: list[RequestFailed] = []
        for (_, adapter), queue in list(self._scheduler.waiting.queues.items()):
            reason = self._adapters.load_error(adapter)
            if reason is None:
                continue
            for request_id in dict.fromkeys(sequence.request_id for sequence in queue):
                self._scheduler.abort(request_id)
                code = FailureCode.ADAPTER_UNAVAILABLE
                failed.append(RequestFailed(request_id=request_id, code=code, message=str(reason)))
        return failed

    def _fail_rows(self, output: SchedulerOutput, result: StepOutput) -> list[RequestFailed]:
        """Ends only the requests from whose logits no token could be chosen."""
        failed: list[RequestFailed] = []
        for item in output.scheduled:
            reason = result.failed.get(item.sequence.seq_id)
            if reason is not None:
                request_id = item.sequence.request_id
                self._scheduler.abort(request_id)
                failed.append(
                    RequestFailed(request_id=request_id, code=FailureCode.INTERNAL, message=reason)
                )
        return failed

    def _token_events(self, updates: list[SequenceUpdate]) -> list[Event]:
        """Returns an event for each update; a request whose event cannot be built fails alone."""
        events: list[TokenEvent] = []
        failed: dict[str, RequestFailed] = {}
        for update in updates:
            request_id = update.sequence.request_id
            try:
                events.append(self._event(update))
            except Exception:
                logger.exception("An event of request %s cannot be built", request_id)
                self._scheduler.abort(request_id)
                failed[request_id] = RequestFailed(
                    request_id=request_id, code=FailureCode.INTERNAL, message=INTERNAL_ERROR
                )
        return [*(event for event in events if event.request_id not in failed), *failed.values()]

    def _event(self, update: SequenceUpdate) -> TokenEvent:
        sequence = update.sequence
        first = sequence.index == 0 and update.position == 0
        return TokenEvent(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[update.token_id],
            text=update.text,
            logprobs=[self._token_text.with_text(update.logprobs)] if update.logprobs else None,
            prompt_logprobs=self._prompt_logprobs(sequence) if first else None,
            cached_tokens=None if update.position else sequence.num_cached_tokens,
            queue_seconds=None if update.position else sequence.queue_seconds,
            finish_reason=update.finish_reason,
            stop_reason=sequence.stop_reason if update.finish_reason else None,
            usage=_usage(sequence) if update.finish_reason else None,
        )

    def _prompt_logprobs(self, sequence: Sequence) -> list[PositionLogprobs | None] | None:
        found = sequence.prompt_logprobs
        if found is None:
            return None
        return [None if at is None else self._token_text.with_text(at) for at in found]


def _usage(sequence: Sequence) -> Usage:
    return Usage(
        prompt_tokens=sequence.num_prompt_tokens,
        completion_tokens=sequence.num_output_tokens,
        cached_tokens=sequence.num_cached_tokens or 0,
    )


def _describe(config: EngineConfig, parts: EngineParts) -> EngineInfo:
    loaded = parts.loaded
    return EngineInfo(
        model=loaded.model.config.model_type,
        model_revision=loaded.revision,
        tokenizer_path=str(parts.tokenizer_folder),
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=loaded.vocab_size,
        eos_token_ids=sorted(loaded.eos_token_ids),
        num_blocks=parts.scheduler.kv.pool.num_blocks,
        block_size=config.block_size,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        recorded_steps=parts.runner.recorded_steps,
        pid=os.getpid(),
    )

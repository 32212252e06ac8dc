"""An engine without a model, for tests of the process around it. Run as a program, it serves.

It counts up from the last prompt token, one token a step. Some prompts make it misbehave.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from loraplex.adapters.manifest import Activation, AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused, RequestRejected
from loraplex.engine.protocol import (
    AbortRequest,
    AdapterInfo,
    AdapterRegistered,
    AdapterUnregistered,
    BasePromptInfo,
    BasePromptPublished,
    BasePromptRef,
    BasePromptRetired,
    BlockMap,
    BlockRun,
    BlockState,
    EngineCommand,
    EngineInfo,
    EngineStats,
    Event,
    FailureCode,
    FinishReason,
    GenerateRequest,
    GetBlockMap,
    GetStats,
    PublishBasePrompt,
    RegisterAdapter,
    RetireBasePrompt,
    SetTenantShares,
    StartProgress,
    TenantShare,
    TenantSharesSet,
    TokenEvent,
    UnregisterAdapter,
    Usage,
)
from loraplex.engine.server import run

# Last prompt tokens.
REFUSED, BROKEN, FATAL, DEADLY, ENDLESS, DEADLOCKED, LATE = 901, 902, 903, 904, 905, 906, 907


INFO = EngineInfo(
    model="Fake",
    model_revision="0",
    tokenizer_path="",
    max_model_len=128,
    max_num_seqs=8,
    vocab_size=1000,
    eos_token_ids=[1],
    num_blocks=8,
    block_size=16,
    device="cpu",
    dtype="float32",
    recorded_steps="none",
    pid=0,
)


class FakeEngine:
    is_waiting = False

    def __init__(self, mood: str = "fake") -> None:
        self.mood = mood
        self.info = msgspec.structs.replace(INFO, pid=os.getpid())
        self.running: dict[str, list[int]] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.outcomes: list[Event] = []
        self.shares: list[TenantShare] = []
        self.num_aborts = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.outcomes)

    def submit(self, command: EngineCommand) -> list[Event]:  # noqa: C901 - a case a command
        match command:
            case GenerateRequest():
                self._add(command)
            case AbortRequest():
                self.abort(command.request_id)
            case RegisterAdapter():
                self._register_adapter(command)
            case UnregisterAdapter():
                self.outcomes.append(AdapterUnregistered(command.request_id))
            case PublishBasePrompt():
                self._publish_base_prompt(command)
            case RetireBasePrompt():
                self.outcomes.append(BasePromptRetired(command.request_id))
            case SetTenantShares():
                return [self._set_tenant_shares(command)]
            case GetBlockMap():
                return [self._block_map(command)]
            case GetStats():
                return [self._stats(command)]
        return []

    def _add(self, request: GenerateRequest) -> None:
        match request.prompt_token_ids[-1]:
            case 901:
                raise RequestRejected(FailureCode.INVALID_REQUEST, "refused", "prompt", ["a", "b"])
            case 902:
                raise RuntimeError("a fault that is this request's own")
            case 904:
                os.kill(os.getpid(), 9)
        self.requests[request.request_id] = request
        resume = request.resume
        known = resume.choices if resume else [[]]
        self.running[request.request_id] = list(next(it for it in known if it is not None))

    def abort(self, request_id: str) -> None:
        self.num_aborts += 1
        self.running.pop(request_id, None)

    def step(self) -> list[Event]:
        time.sleep(0.001)  # as if it computed something
        events, self.outcomes = self.outcomes, []
        for request_id in list(self.running):
            events += self._advance(request_id)
        return events

    def _register_adapter(self, command: RegisterAdapter) -> None:
        if self.mood == "picky":
            raise RequestRejected(FailureCode.ADAPTER_REJECTED, "not this one")
        digest = "other" if self.mood == "forgetful" else "d"
        ref = AdapterRef(tenant=command.tenant, adapter_id=command.adapter_id, digest=digest)
        info = AdapterInfo(
            ref=ref,
            rank=1,
            target_modules=[],
            num_modules=0,
            num_bytes=0,
            activation=command.activation or Activation.ALWAYS,
            base_prompt=command.base_prompt,
        )
        self.outcomes.append(AdapterRegistered(command.request_id, info))

    def _publish_base_prompt(self, command: PublishBasePrompt) -> None:
        info = BasePromptInfo(
            ref=BasePromptRef(prompt_id=command.prompt_id, version=command.version),
            num_tokens=len(command.token_ids),
            num_blocks=0,
        )
        self.outcomes.append(BasePromptPublished(command.request_id, info))

    def prepare(self) -> bool:
        return False

    def _set_tenant_shares(self, command: SetTenantShares) -> TenantSharesSet:
        faults = [f"{share.tenant} asks too much" for share in command.shares if share.floor > 8]
        if faults:
            raise RequestRejected(FailureCode.INVALID_REQUEST, faults[0], "shares", faults)
        self.shares = command.shares
        return TenantSharesSet(command.request_id)

    def _block_map(self, command: GetBlockMap) -> BlockMap:
        runs = [BlockRun(i, BlockState.HELD, 1, share.floor) for i, share in enumerate(self.shares)]
        owners = [share.tenant for share in self.shares]
        return BlockMap(request_id=command.request_id, owners=owners, runs=runs)

    def _stats(self, command: GetStats) -> EngineStats:
        return EngineStats(
            request_id=command.request_id,
            num_running=len(self.running),
            num_preemptions=self.num_aborts,
        )

    def save_cache(self) -> None:
        pass

    def close(self) -> None:
        self.running.clear()

    def _advance(self, request_id: str) -> list[Event]:
        request, output = self.requests[request_id], self.running[request_id]
        match request.prompt_token_ids[-1]:
            case 903:
                raise RuntimeError("a fault of the whole engine")
            case 905:
                while True:
                    pass
            case 906:
                threading.Event().wait()
            case 907 if len(output) == 3:
                os.kill(os.getpid(), 9)
        output.append(request.prompt_token_ids[-1] + len(output) + 1)
        is_last = len(output) == request.sampling.max_tokens
        if is_last:
            del self.running[request_id]
        return [
            TokenEvent(
                request_id=request_id,
                index=index,
                token_ids=output[-1:],
                text=f"{output[-1]} ",
                cached_tokens=0 if len(output) == 1 else None,
                finish_reason=FinishReason.LENGTH if is_last else None,
                usage=Usage(len(request.prompt_token_ids), len(output), 0) if is_last else None,
            )
            for index in range(request.sampling.n)
        ]


def make_engine(config: EngineConfig, progress: Callable[[StartProgress], None]) -> FakeEngine:
    for _ in range(20 if config.model == "slow" else 1):
        progress(StartProgress("Counting", 1, 2))
        time.sleep(0.05)
    if config.model == "refused":
        raise ConfigRefused("3 blocks are needed, 2 fit")
    if config.model == "crashing":
        os._exit(7)
    return FakeEngine(config.model)


def main() -> int:
    return run(lambda: None, make_engine)


if __name__ == "__main__":
    sys.exit(main())

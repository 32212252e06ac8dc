"""Every message crosses the wire and comes out as what it was."""

import msgspec
import pytest
from support.engine import fake_engine

from loraplex.adapters.manifest import Activation, AdapterRef, Folder
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
    Command,
    EngineStats,
    Event,
    FailureCode,
    FinishReason,
    GenerateRequest,
    GetBlockMap,
    GetStats,
    Hello,
    PositionLogprobs,
    PublishBasePrompt,
    RegisterAdapter,
    RequestFailed,
    RetireBasePrompt,
    SetTenantShares,
    StartProgress,
    TenantShare,
    TenantSharesSet,
    TenantStats,
    TokenEvent,
    TokenLogprob,
    UnregisterAdapter,
    Usage,
)
from loraplex.engine.sampling_params import SamplingParams

REF = AdapterRef(tenant="t", adapter_id="a", digest="d")
LOGPROBS = PositionLogprobs(TokenLogprob(1, -9999.0, "\ufffd", [0xF0], 9), [])
PROMPT = BasePromptInfo(ref=BasePromptRef(prompt_id="p", version=1), num_tokens=2, num_blocks=1)
COMMANDS: list[Command] = [
    GenerateRequest(
        request_id="r",
        tenant="t",
        namespace="n",
        prompt_token_ids=[0, 2**31 - 1],
        sampling=SamplingParams(stop=("\U0001f600",), logit_bias={3: -1.0}, seed=-(2**63)),
        adapter=REF,
        priority=-5,
    ),
    AbortRequest("r"),
    RegisterAdapter(request_id="r", tenant="t", adapter_id="a", source=Folder("folder")),
    UnregisterAdapter(request_id="r", adapter=REF),
    PublishBasePrompt(request_id="r", prompt_id="p", version=1, token_ids=[3, 4]),
    RetireBasePrompt(request_id="r", prompt_id="p", version=1),
    SetTenantShares("r", [TenantShare("t", floor=2, ceiling=4, weight=0.5)]),
    GetStats("r"),
    GetBlockMap("r"),
    Hello(),
]
EVENTS: list[Event] = [
    TokenEvent(
        request_id="r",
        index=2,
        token_ids=[7],
        text="\U0001f469\u200d\U0001f467",
        logprobs=[LOGPROBS],
        prompt_logprobs=[None, LOGPROBS],
        finish_reason=FinishReason.STOP,
        stop_reason="stop",
        usage=Usage(3, 2, 1),
    ),
    TokenEvent(request_id="r", index=0, token_ids=[1], text="", stop_reason=5),
    RequestFailed(request_id="r", code=FailureCode.INTERNAL, message="m", faults=["a", "b"]),
    AdapterRegistered(
        "r",
        AdapterInfo(
            ref=REF,
            rank=8,
            target_modules=["q_proj"],
            num_modules=1,
            num_bytes=10,
            activation=Activation.ALWAYS,
        ),
    ),
    AdapterUnregistered("r"),
    BasePromptPublished("r", PROMPT),
    BasePromptRetired("r"),
    TenantSharesSet("r"),
    EngineStats(
        num_running=1,
        mean_waste=0.5,
        tenants=[TenantStats(tenant="t", ceiling=8, evictions={"capacity": 2})],
    ),
    BlockMap(request_id="r", owners=["", "t"], runs=[BlockRun(1, BlockState.SHARED, 2, 5)]),
    StartProgress("Loading weights", 1, 4),
    fake_engine.INFO,
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda message: type(message).__name__)
def test_a_command_survives_the_wire(command: Command) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda message: type(message).__name__)
def test_an_event_survives_the_wire(event: Event) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event) == event


def test_every_message_there_is_was_sent_here() -> None:
    assert {type(message) for message in COMMANDS} == set(Command.__args__)
    assert {type(message) for message in EVENTS} == set(Event.__args__)


def test_a_command_is_no_event() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Hello()), type=Event)

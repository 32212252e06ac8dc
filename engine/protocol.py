"""The wire between a client and an engine: every message, and nothing else. Torch-free.

Commands go to the engine, events come back. Each accepted `GenerateRequest` ends in one
`TokenEvent` with a `finish_reason` for each choice, or in one `RequestFailed` for all of them.
"""

from enum import IntEnum, StrEnum

import msgspec

from loraplex.adapters.manifest import Activation, AdapterRef, AdapterStats, Folder, Stored
from loraplex.engine.sampling_params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, a stop string or a stop token
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the caller asked for it


class FailureCode(StrEnum):
    """Why a request or a registration failed; the platform maps each code to one HTTP status."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    BUDGET_EXCEEDED = "budget_exceeded"
    QUEUE_FULL = "queue_full"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    ADAPTER_REJECTED = "adapter_rejected"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    BASE_PROMPT_NOT_FOUND = "base_prompt_not_found"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    REQUEST_QUARANTINED = "request_quarantined"  # it ended engines, and is not tried again
    INTERNAL = "internal"


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token at one position, with its log-probability under the model's own distribution."""

    token_id: int
    logprob: float
    text: str  # what this token alone decodes to
    bytes: list[int]  # its UTF-8 bytes, where the tokenizer tells them
    rank: int  # 1 is the most likely token


class PositionLogprobs(msgspec.Struct, frozen=True):
    chosen: TokenLogprob
    top: list[TokenLogprob]  # most likely first; as many as were asked for


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache at first admission


class BasePromptRef(msgspec.Struct, frozen=True, kw_only=True):
    """Names one immutable version of a prompt that the operator published."""

    prompt_id: str  # a server-made id
    version: int


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """The progress that another engine made with a request."""

    choices: list[list[int] | None]  # the tokens of each choice, one at least; None: it has ended
    cached_tokens: int  # as the events of that engine said


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    request_id: str
    tenant: str  # whose request; set by the server, never by the caller
    namespace: str  # whose KV blocks it may share; set by the server, never by the caller
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterRef | None = None  # None: the base model
    base_prompt: BasePromptRef | None = None  # put before the prompt; None: the adapter's, if any
    priority: int = 0  # lower runs first
    call_id: str | None = None  # of all prompts of one API call, which let other calls pass
    resume: Resume | None = None  # goes on behind these tokens; events tell of new ones only

    @property
    def num_open_choices(self) -> int:
        """Returns the choices that have not had their last event."""
        if self.resume is None:
            return self.sampling.n
        return sum(tokens is not None for tokens in self.resume.choices)


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class RegisterAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="register_adapter"):
    """Reads, checks and stores an adapter. Answered by `AdapterRegistered` or `RequestFailed`."""

    request_id: str
    tenant: str
    adapter_id: str  # a server-made id; a display name never reaches the engine
    source: Folder | Stored
    allow_base_mismatch: bool = False  # accept an adapter trained on a base of another name
    activation: Activation | None = None  # from where on it acts; None: as it was trained
    base_prompt: BasePromptRef | None = None  # put before every prompt that names no other


class UnregisterAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unregister_adapter"):
    """Removes an adapter. Answered by `AdapterUnregistered` once no sequence uses it any more."""

    request_id: str
    adapter: AdapterRef


class TenantShare(msgspec.Struct, frozen=True):
    """One tenant's share of this engine."""

    tenant: str
    floor: int = 0  # KV blocks that it can always have
    ceiling: int | None = None  # KV blocks that it can have at most; None: all that are there
    weight: float = 1.0  # its part of the computing time beside others that wait


class PublishBasePrompt(msgspec.Struct, frozen=True, kw_only=True, tag="publish_base_prompt"):
    """Computes a prompt once, for all tenants. Answered by `BasePromptPublished` once it is
    computed, or by `RequestFailed`. The same prompt again changes nothing."""

    request_id: str
    prompt_id: str  # a server-made id
    version: int
    token_ids: list[int]


class RetireBasePrompt(msgspec.Struct, frozen=True, kw_only=True, tag="retire_base_prompt"):
    """Withdraws a prompt from new requests at once. Answered by `BasePromptRetired` when the last
    request that uses it has ended, or by `RequestFailed`."""

    request_id: str
    prompt_id: str
    version: int


class SetTenantShares(msgspec.Struct, frozen=True, tag="set_tenant_shares"):
    """Sets the shares of these tenants; other tenants keep theirs. All or nothing: answered by
    `TenantSharesSet`, or by `RequestFailed` with every fault."""

    request_id: str
    shares: list[TenantShare]


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    request_id: str


class GetBlockMap(msgspec.Struct, frozen=True, tag="get_block_map"):
    request_id: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A client's first message. Answered by `StartProgress`, then by `EngineInfo`."""


EngineCommand = (
    GenerateRequest
    | AbortRequest
    | RegisterAdapter
    | UnregisterAdapter
    | PublishBasePrompt
    | RetireBasePrompt
    | SetTenantShares
    | GetStats
    | GetBlockMap
)
"""What an engine obeys or refuses; each has a request id."""

Command = EngineCommand | Hello


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, tag="token"):
    request_id: str
    index: int  # which of the n choices
    token_ids: list[int]
    text: str  # whole characters only; may be empty while a character or a stop string is open
    logprobs: list[PositionLogprobs] | None = None  # one per token id
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # on the first event; [0] is None
    cached_tokens: int | None = None  # as in `Usage`; on each choice's first event
    queue_seconds: float | None = None  # from arrival to first admission; on the same event
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    usage: Usage | None = None  # this choice's, on the event with a finish_reason


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    request_id: str
    code: FailureCode
    message: str  # safe to show to a tenant: no path, no trace
    param: str | None = None
    faults: list[str] = []


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    ref: AdapterRef
    rank: int  # the largest in it
    target_modules: list[str]
    num_modules: int
    num_bytes: int
    activation: Activation
    frontier: int = 0  # the layers below it store what the base does; 2**31: all of them
    base_prompt: BasePromptRef | None = None  # put before every prompt that names no other
    base_model: str = ""  # what its config says that it was trained on
    base_mismatch: bool = False  # that is another name than the served model's, and was accepted


class AdapterRegistered(msgspec.Struct, frozen=True, tag="adapter_registered"):
    request_id: str
    info: AdapterInfo


class AdapterUnregistered(msgspec.Struct, frozen=True, tag="adapter_unregistered"):
    request_id: str


class BasePromptInfo(msgspec.Struct, frozen=True, kw_only=True):
    ref: BasePromptRef
    num_tokens: int
    num_blocks: int  # that it keeps; behind a sliding window it needs none


class BasePromptPublished(msgspec.Struct, frozen=True, tag="base_prompt_published"):
    request_id: str
    info: BasePromptInfo


class BasePromptRetired(msgspec.Struct, frozen=True, tag="base_prompt_retired"):
    request_id: str


class BasePromptStats(msgspec.Struct, frozen=True, kw_only=True):
    info: BasePromptInfo
    is_ready: bool  # computed
    is_retired: bool
    num_users: int  # sequences, waiting ones included
    num_saved_blocks: int  # that its users would hold in addition, were nothing shared


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """One account's part of `EngineStats`. Blocks are KV blocks, times are in seconds."""

    tenant: str  # a tenant's id, or the operator's account
    floor: int = 0
    ceiling: int | None = None
    weight: float = 1.0
    held_blocks: int = 0  # in use, and charged to this account
    cached_blocks: int = 0  # free, with a prefix in them
    num_running: int = 0
    num_waiting: int = 0
    private_block_seconds: float = 0.0  # of held blocks with one holder
    shared_block_seconds: float = 0.0  # of held blocks with several
    saved_block_seconds: float = 0.0  # that its sequences used beyond what it was charged for
    cached_block_seconds: float = 0.0
    evictions: dict[str, int] = {}  # cached blocks lost: capacity, ceiling, claw_back, retired
    num_preemptions: int = 0
    queue_seconds: float = 0.0  # between a request's arrival and its first admission, in all
    num_queued: int = 0  # requests in that sum
    offloaded_bytes: int = 0
    fetched_bytes: int = 0
    offload_bytes: int = 0  # of its blocks in host memory and on disk, now
    prefill_tokens: int = 0  # computed; cached ones are not served
    decode_tokens: int = 0
    adapter_load_bytes: int = 0  # into slots
    service: float = 0.0  # its virtual token counter


class OffloadStats(msgspec.Struct, frozen=True, kw_only=True):
    """What has been offloaded since the start, and what the tiers hold now."""

    host_bytes: int = 0
    disk_bytes: int = 0
    out_bytes: int = 0  # from the device to host memory
    in_bytes: int = 0
    written_bytes: int = 0  # from host memory to the disk
    read_bytes: int = 0
    host_hits: int = 0  # blocks that came back from host memory
    disk_hits: int = 0  # blocks that came back to host memory from the disk
    dropped_blocks: int = 0  # evicted, and taken by no tier
    discarded_blocks: int = 0  # damaged on disk


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges are values now, counters run from the engine's start. Times in seconds."""

    request_id: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # KV blocks in all, the null block apart
    num_free_blocks: int = 0  # cached content included
    num_cached_blocks: int = 0  # free blocks that still hold a prefix
    allocated_slots: int = 0  # token slots in blocks that sequences hold
    used_slots: int = 0  # of these, holding a token
    block_size: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # in tokens
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_replayed_steps: int = 0  # of these, from a recording
    copied_blocks: int = 0  # copy-on-write
    offload: OffloadStats = OffloadStats()
    peak_waste: float = 0.0  # largest (allocated - used) / allocated seen with 8 blocks or more
    mean_waste: float = 0.0
    adapters: AdapterStats = AdapterStats()
    base_prompts: list[BasePromptStats] = []
    base_prompt_saved_tokens: int = 0  # of base prompts, that requests did not have to compute

    tenants: list[TenantStats] = []


class TenantSharesSet(msgspec.Struct, frozen=True, tag="tenant_shares_set"):
    request_id: str


class BlockState(IntEnum):
    BLANK = 0  # free, with nothing in it
    CACHED = 1  # free, with a prefix that can be found
    HELD = 2  # by one sequence
    SHARED = 3  # by several
    BASE_PROMPT = 4  # an operator's, held by all who use it
    NULL = 5  # never handed out


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of blocks that are alike."""

    owner: int  # place in `BlockMap.owners`
    state: BlockState
    references: int
    count: int


class BlockMap(msgspec.Struct, frozen=True, kw_only=True, tag="block_map"):
    """All KV blocks, the null block included, in at most 4 kB per 10,000."""

    request_id: str
    owners: list[str]  # tenants and the operator; "" for nobody, and for tenants without a name
    runs: list[BlockRun]
    is_rounded: bool = False  # references to powers of 2, and small tenants may be without a name


class StartProgress(msgspec.Struct, frozen=True, tag="start_progress"):
    """The progress of the engine's start; sent until `EngineInfo` is."""

    stage: str  # for example "Loading weights"
    completed: int
    total: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Sent once, when the engine can serve."""

    model: str  # architecture
    model_revision: str  # digest of the checkpoint
    tokenizer_path: str  # a folder with tokenizer.json
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    recorded_steps: str  # which are replayed without the model's own code, and why others are not
    pid: int


Event = (
    TokenEvent
    | RequestFailed
    | AdapterRegistered
    | AdapterUnregistered
    | BasePromptPublished
    | BasePromptRetired
    | TenantSharesSet
    | EngineStats
    | BlockMap
    | StartProgress
    | EngineInfo
)

"""The metrics' names and help texts, each with the attribute that it shows, if it shows one."""

SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 80)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = tuple(unit * 10**power for power in range(6) for unit in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)

GAUGES = {
    "vllm:num_requests_running": ("num_running", "Number of running sequences"),
    "vllm:num_requests_waiting": ("num_waiting", "Number of waiting sequences"),
    "loraplex:kv_blocks": ("num_blocks", "Number of KV blocks in the pool"),
    "loraplex:kv_blocks_free": (
        "num_free_blocks",
        "Number of free KV blocks, cached ones included",
    ),
    "loraplex:kv_blocks_cached": (
        "num_cached_blocks",
        "Number of free KV blocks that hold a cached prefix",
    ),
    "loraplex:kv_slots_allocated": (
        "allocated_slots",
        "Number of token slots in KV blocks held by sequences",
    ),
    "loraplex:kv_slots_used": (
        "used_slots",
        "Number of token slots in held KV blocks that hold a token",
    ),
    "loraplex:kv_waste_peak": ("peak_waste", "Peak share of allocated token slots that are unused"),
    "loraplex:kv_waste_mean": ("mean_waste", "Mean share of allocated token slots that are unused"),
    "loraplex:offload_host_bytes": ("offload.host_bytes", "Bytes of KV blocks in host memory"),
    "loraplex:offload_disk_bytes": ("offload.disk_bytes", "Bytes of KV blocks on disk"),
    "loraplex:adapters_registered": ("adapters.registered", "Number of registered adapters"),
    "loraplex:adapters_resident": (
        "adapters.resident",
        "Number of adapters resident in a device slot",
    ),
    "loraplex:adapter_slots": ("adapters.slots", "Number of adapter slots on the device"),
    "loraplex:adapter_references": (
        "adapters.references",
        "Number of sequences that hold an adapter slot",
    ),
}
COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Number of prompt tokens"),
    "vllm:generation_tokens": ("generation_tokens", "Number of generated tokens"),
    "vllm:prefix_cache_queries": (
        "prefix_cache_queries",
        "Number of prompt tokens looked up in the prefix cache",
    ),
    "vllm:prefix_cache_hits": (
        "prefix_cache_hits",
        "Number of prompt tokens found in the prefix cache",
    ),
    "vllm:num_preemptions": ("num_preemptions", "Number of preempted sequences"),
    "loraplex:prompt_tokens_computed": (
        "computed_prompt_tokens",
        "Number of prompt tokens computed",
    ),
    "loraplex:steps": ("num_steps", "Number of engine steps"),
    "loraplex:steps_replayed": (
        "num_replayed_steps",
        "Number of engine steps replayed from a recording",
    ),
    "loraplex:kv_blocks_copied": ("copied_blocks", "Number of KV blocks copied on write"),
    "loraplex:offload_out_bytes": (
        "offload.out_bytes",
        "Bytes of KV blocks moved from the device to host memory",
    ),
    "loraplex:offload_in_bytes": (
        "offload.in_bytes",
        "Bytes of KV blocks moved from host memory to the device",
    ),
    "loraplex:offload_written_bytes": (
        "offload.written_bytes",
        "Bytes of KV blocks written to the disk tier",
    ),
    "loraplex:offload_read_bytes": (
        "offload.read_bytes",
        "Bytes of KV blocks read from the disk tier",
    ),
    "loraplex:offload_host_hits": ("offload.host_hits", "Number of KV blocks found in host memory"),
    "loraplex:offload_disk_hits": (
        "offload.disk_hits",
        "Number of KV blocks found in the disk tier",
    ),
    "loraplex:offload_dropped_blocks": (
        "offload.dropped_blocks",
        "Number of evicted KV blocks that no tier kept",
    ),
    "loraplex:offload_discarded_blocks": (
        "offload.discarded_blocks",
        "Number of damaged KV blocks discarded from the disk tier",
    ),
    "loraplex:base_prompt_saved_tokens": (
        "base_prompt_saved_tokens",
        "Number of prompt tokens that base prompts saved computing",
    ),
    "loraplex:adapter_loads": ("adapters.loads", "Number of adapter loads into host memory"),
    "loraplex:adapter_evictions": (
        "adapters.evictions",
        "Number of adapters evicted from a device slot",
    ),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from a request to its first token", SHORT),
    "time_per_output_token_seconds": ("Time of a request per generated token", SHORT),
    "inter_token_latency_seconds": ("Time from one token to the next", SHORT),
    "e2e_request_latency_seconds": ("Time from a request to its last token", LONG),
    "request_queue_time_seconds": ("Time from a choice's arrival to its admission", LONG),
    "request_prefill_time_seconds": ("Time from a choice's admission to its first token", LONG),
    "request_inference_time_seconds": ("Time from a choice's admission to its last token", LONG),
    "request_decode_time_seconds": ("Time from a choice's first token to its last", LONG),
    "request_prompt_tokens": ("Number of prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Number of tokens generated for a choice", TOKENS),
    "request_max_num_generation_tokens": (
        "Number of tokens generated for the longest choice of a request",
        TOKENS,
    ),
    "request_params_max_tokens": ("Value of max_tokens in requests that have one", TOKENS),
    "request_params_n": ("Number of choices that a request asks for", CHOICES),
}
FAILOVER_COUNTERS = {
    "loraplex:request_moves": (
        "moves",
        "Number of times that a request continued in another engine after its own had ended",
    ),
    "loraplex:requests_quarantined": (
        "quarantined",
        "Number of requests refused because two engines ended while running them",
    ),
}
BASE_PROMPT_GAUGES = {
    "loraplex:base_prompt_blocks": "Number of KV blocks pinned by a base prompt",
    "loraplex:base_prompt_users": "Number of sequences that use a base prompt",
    "loraplex:base_prompt_saved_blocks": "Number of KV blocks saved by sharing a base prompt",
}
TENANT_GAUGES = {
    "floor_blocks": ("floor", "Guaranteed number of KV blocks of a tenant"),
    "ceiling_blocks": ("ceiling", "Maximum number of KV blocks of a tenant, if it has a ceiling"),
    "weight": ("weight", "Weight of a tenant in the sharing of service"),
    "kv_blocks_held": ("held_blocks", "Number of KV blocks in use that are charged to a tenant"),
    "kv_blocks_cached": (
        "cached_blocks",
        "Number of free KV blocks that hold a cached prefix of a tenant",
    ),
    "sequences_running": ("num_running", "Number of running sequences of a tenant"),
    "sequences_waiting": ("num_waiting", "Number of waiting sequences of a tenant"),
    "offload_bytes": ("offload_bytes", "Bytes of KV blocks of a tenant in host memory and on disk"),
    "service": ("service", "Virtual token counter of a tenant"),
}
TENANT_COUNTERS = {
    "private_block_seconds": (
        "private_block_seconds",
        "Block-seconds of KV blocks charged to a tenant and used by one sequence",
    ),
    "shared_block_seconds": (
        "shared_block_seconds",
        "Block-seconds of KV blocks charged to a tenant and used by several sequences",
    ),
    "saved_block_seconds": (
        "saved_block_seconds",
        "Block-seconds of KV blocks that a tenant uses uncharged",
    ),
    "cached_block_seconds": (
        "cached_block_seconds",
        "Block-seconds of cached KV blocks of a tenant",
    ),
    "preemptions": ("num_preemptions", "Number of preempted sequences of a tenant"),
    "queue_seconds": (
        "queue_seconds",
        "Time from arrival to first admission of the requests of a tenant, in seconds",
    ),
    "queued": ("num_queued", "Number of admitted requests of a tenant"),
    "offloaded_bytes": (
        "offloaded_bytes",
        "Bytes of KV blocks of a tenant moved from the device to host memory",
    ),
    "fetched_bytes": (
        "fetched_bytes",
        "Bytes of KV blocks of a tenant moved from host memory to the device",
    ),
    "prefill_tokens": ("prefill_tokens", "Number of prompt tokens computed for a tenant"),
    "decode_tokens": ("decode_tokens", "Number of tokens generated for a tenant"),
    "adapter_load_bytes": (
        "adapter_load_bytes",
        "Bytes of adapters placed into device slots for a tenant",
    ),
}

"""Assembles the parts of one engine, in the order in which they need each other."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer

from loraplex.adapters.injection import LoRASites, inject_lora
from loraplex.adapters.layers import LoRAContext
from loraplex.adapters.manager import LoRAManager
from loraplex.engine.build.kv import build_kv, eviction_policy, num_kv_blocks
from loraplex.engine.build.recording import gpu_faults_refused, record_steps
from loraplex.engine.build.rehearsal import rehearse
from loraplex.engine.build.self_check import check_forward
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused, UnsupportedModel
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.recompute_cost import RecomputeCost
from loraplex.engine.kv.storage.groups import KVGroup, choose_group_size, group_layers
from loraplex.engine.model.checkpoint import first_line
from loraplex.engine.model.feed_forward import replace_feed_forward
from loraplex.engine.model.loader import LoadedModel, load_model
from loraplex.engine.model.norms import replace_norms
from loraplex.engine.model.packing import leave_checkpoint, pack_linears
from loraplex.engine.model.probe import AttentionProbe, probe_layers
from loraplex.engine.model.rotary import replace_rotary
from loraplex.engine.protocol import StartProgress
from loraplex.engine.scheduling.adapter_slots import AdapterSlots
from loraplex.engine.scheduling.fair_share import FairPolicy
from loraplex.engine.scheduling.policy import FCFSPolicy
from loraplex.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.step import BlockCopy
from loraplex.engine.worker.attention import AttentionContext
from loraplex.engine.worker.forward import Forward
from loraplex.engine.worker.kv_memory import default_adapter_memory
from loraplex.engine.worker.model_runner import ModelRunner, RecordedSteps
from loraplex.engine.worker.prefault import Prefault
from loraplex.engine.worker.sampler import Sampler
from loraplex.kernels.dispatch import NAIVE, choose_kernels
from loraplex.kernels.kernel_set import Kernels

MAX_LOGITS = 1 << 26  # numbers of float32 logits that one step may make for prompt logprobs
_STAGES = ("Loading weights", "Placing adapters' layers", "Allocating the KV cache")


@dataclass(frozen=True)
class EngineParts:
    loaded: LoadedModel
    tokenizer: Tokenizer
    tokenizer_folder: Path
    lora: LoRAManager
    scheduler: Scheduler
    runner: ModelRunner
    recompute: RecomputeCost
    prefault: Prefault


def assemble(config: EngineConfig, on_progress: Callable[[StartProgress], None]) -> EngineParts:
    """Loads the model and builds the engine around it.

    Raises:
        StartRefused: when the model or the settings cannot be served.
    """

    def begin(stage: int) -> None:
        on_progress(StartProgress(_STAGES[stage], stage, len(_STAGES)))

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    begin(0)
    loaded = load_model(config)
    tokenizer_folder = _tokenizer_folder(config, loaded)
    tokenizer = _read_tokenizer(tokenizer_folder / "tokenizer.json")
    begin(1)
    with torch.inference_mode():
        probe = probe_layers(loaded.model, loaded.max_model_len)
    kernels = _kernels(config, loaded)
    context = LoRAContext()
    sites = inject_lora(loaded.model, context, config.max_adapter_slots, kernels)
    with gpu_faults_refused(config):
        _make_ours(config, loaded, probe, kernels)
    adapter_memory = _adapter_memory(config, loaded, sites)
    lora = _lora(config, loaded, sites, adapter_memory, tokenizer)
    begin(2)
    stops = StopChecker(loaded.eos_token_ids, loaded.vocab_size)
    groups = _groups(config, probe, lora)
    with gpu_faults_refused(config):
        rehearsed = _rehearse(config, loaded, probe, kernels, groups, context)
        num_blocks = num_kv_blocks(config, loaded, probe, groups, adapter_memory)
        del rehearsed
        kv = build_kv(config, loaded, probe, kernels, groups, num_blocks)
        forward = _forward(config, loaded, kv.attention, context)
        recorded = record_steps(config, forward, kv.manager, kernels)
    scheduler = _scheduler(config, loaded, kv.manager, lora, stops)
    transfers = kv.offload.transfers
    runner = ModelRunner(forward, kv.cache, Sampler(kernels), lora, recorded, transfers)
    return EngineParts(
        loaded=loaded,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        lora=lora,
        scheduler=scheduler,
        runner=runner,
        recompute=kv.recompute,
        prefault=Prefault(kv.cache.storage, kv.manager.pool),
    )


def _kernels(config: EngineConfig, loaded: LoadedModel) -> Kernels:
    with gpu_faults_refused(config):
        kernels = choose_kernels(config.kernels, loaded.device, loaded.dtype)
    if loaded.device.type == "cpu" and (kernels is NAIVE or loaded.dtype != torch.bfloat16):
        leave_checkpoint(loaded.model)  # where linears are packed, that does it
    return kernels


def _lora(
    config: EngineConfig,
    loaded: LoadedModel,
    sites: LoRASites,
    device_bytes: int,
    tokenizer: Tokenizer,
) -> LoRAManager:
    added_tokens = tokenizer.get_added_tokens_decoder()
    return LoRAManager(
        sites,
        store=Path(config.adapter_store),
        base_names=_base_names(loaded),
        device_bytes=device_bytes,
        eviction=eviction_policy(config),
        added_tokens={token.content: number for number, token in added_tokens.items()},
    )


def _scheduler(
    config: EngineConfig,
    loaded: LoadedModel,
    kv: KVCacheManager,
    lora: LoRAManager,
    stops: StopChecker,
) -> Scheduler:
    adapter_slots = AdapterSlots(lora, config.adapter_wait)
    is_fair = config.scheduling == "fair"
    policy = FairPolicy(exempt=OPERATOR) if is_fair else FCFSPolicy()
    return Scheduler(kv, adapter_slots, policy, _limits(config, loaded), stops)


def _make_ours(
    config: EngineConfig, loaded: LoadedModel, probe: AttentionProbe, kernels: Kernels
) -> None:
    """Installs our kernels and formats, and proves that the model still computes the same."""
    _put_kernels_in(loaded, probe, kernels)
    if config.quantization != "none":  # what eight bits round away is not compared
        check_forward(loaded, probe, kernels, config.block_size)
    _pack(loaded, config.quantization, kernels)
    if config.quantization == "none":
        check_forward(loaded, probe, kernels, config.block_size)


@torch.inference_mode()
def _put_kernels_in(loaded: LoadedModel, probe: AttentionProbe, kernels: Kernels) -> None:
    """Replaces the modules that our kernels compute faster; attention and LoRA are replaced
    already."""
    if kernels is NAIVE:
        return
    replace_norms(loaded.model, kernels)
    replace_rotary(probe.modules.values(), loaded.dtype, kernels)
    replace_feed_forward(loaded.model, kernels)


@torch.inference_mode()
def _pack(loaded: LoadedModel, quantization: str, kernels: Kernels) -> None:
    """Puts the linears' weights into the format in which they are served.

    Raises:
        ConfigRefused: they cannot be had in eight bits.
    """
    chosen = kernels.int8_linears if quantization == "int8" else kernels.linears
    if quantization == "int8" and (chosen is None or loaded.dtype != torch.bfloat16):
        raise ConfigRefused("quantization int8 needs a model in bfloat16 on a CPU")
    if chosen is not None:
        pack_linears(loaded.model, chosen)


def _limits(config: EngineConfig, loaded: LoadedModel) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logits_rows=max(1, MAX_LOGITS // loaded.vocab_size),
    )


def _adapter_memory(config: EngineConfig, loaded: LoadedModel, sites: LoRASites) -> int:
    """Returns the bytes that resident adapters may take together."""
    if config.adapter_memory is not None:
        return config.adapter_memory
    numbers = sites.catalogue.linear_numbers_per_rank
    return default_adapter_memory(numbers, config.max_adapter_slots, loaded.dtype)


def _groups(config: EngineConfig, probe: AttentionProbe, lora: LoRAManager) -> list[KVGroup]:
    layers = list(probe.layers.values())
    size = config.kv_group_size
    return group_layers(layers, size or choose_group_size(layers, lora.stored_frontiers()))


def _forward(
    config: EngineConfig, loaded: LoadedModel, attention: AttentionContext, context: LoRAContext
) -> Forward:
    on_cuda = loaded.device.type == "cuda"
    return Forward(loaded, attention, context, config.max_adapter_slots if on_cuda else None)


def _rehearse(
    config: EngineConfig,
    loaded: LoadedModel,
    probe: AttentionProbe,
    kernels: Kernels,
    groups: list[KVGroup],
    context: LoRAContext,
) -> RecordedSteps | None:
    """Runs steps on a GPU in a KV cache that is thrown away.

    Returns:
        what to hold until the memory that is free beside such steps is known.
    """
    if loaded.device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # what torch keeps of freed weights is free, too
    without_offload = msgspec.structs.replace(config, offload_memory=0, offload_disk=0)
    kv = build_kv(without_offload, loaded, probe, kernels, groups, num_blocks=2)
    kv.cache.copy([BlockCopy(source=0, target=1)])
    forward = _forward(config, loaded, kv.attention, context)
    limits = _limits(config, loaded)
    rehearse(forward, Sampler(kernels), loaded, limits, len(groups), config.block_size)
    return record_steps(config, forward, kv.manager, kernels, sizes=(config.max_num_seqs,))


def _read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer. Raises UnsupportedModel where the file is none."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedModel(f"cannot read {path}: {error}") from error


def _tokenizer_folder(config: EngineConfig, loaded: LoadedModel) -> Path:
    """Returns the folder that holds tokenizer.json: the model's, or a converted copy in the data
    folder.

    Raises:
        UnsupportedModel: when the model has no tokenizer that can be converted.
    """
    if (loaded.folder / "tokenizer.json").is_file():
        return loaded.folder
    copy = Path(config.adapter_store).parent / "tokenizers" / loaded.revision
    if not (copy / "tokenizer.json").is_file():
        from transformers import AutoTokenizer  # noqa: PLC0415 - rarely needed, slow to import

        try:
            AutoTokenizer.from_pretrained(loaded.folder, local_files_only=True).save_pretrained(
                copy
            )
        except Exception as error:  # whatever a tokenizer of another form meets
            message = f"{loaded.folder} has no usable tokenizer: {first_line(error)}"
            raise UnsupportedModel(message) from error
    if not (copy / "tokenizer.json").is_file():
        raise UnsupportedModel(f"{loaded.folder} has a tokenizer without a fast version")
    return copy


def _base_names(loaded: LoadedModel) -> tuple[str, ...]:
    """Returns the names under which an adapter may refer to this base model."""
    return tuple({loaded.folder.resolve().name, str(loaded.model.config.name_or_path or "")})

"""The recorded steps of one engine, and why one whose steps cannot be recorded does not start."""

import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.worker.forward import Forward
from loraplex.engine.worker.kv_memory import readable
from loraplex.engine.worker.model_runner import RecordedSteps
from loraplex.engine.worker.replay.cuda_graphs import CudaCapture, StepGraphs
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize
from loraplex.engine.worker.replay.tapes import LARGEST_SAMPLE, StepTapes
from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.kernel_set import Kernels


@torch.inference_mode()
def record_steps(
    config: EngineConfig, forward: Forward, kv: KVCacheManager, kernels: Kernels
) -> RecordedSteps | None:
    """For kernels that can be recorded: on a CPU when they are first needed, on CUDA at once.

    Raises:
        ConfigRefused: the GPU lacks the memory, or cannot run the kernels.
    """
    num_slots, num_rows = config.max_adapter_slots, config.max_num_seqs
    if kernels is not NAIVE and forward.device.type == "cuda":
        size = StepSize(num_rows, num_rows, num_rows)
        buffers = StepBuffers(kv, size, num_slots, forward.device)
        try:
            return StepGraphs(buffers, CudaCapture(num_rows), forward, num_slots)
        except Exception as error:
            refusal = _refusal(error, config)
            raise (refusal or error) from error
    if kernels.name == "cpu":
        size = StepSize(config.max_num_batched_tokens, num_rows, num_rows)
        buffers = StepBuffers(kv, size.grown(LARGEST_SAMPLE), num_slots, forward.device)
        return StepTapes(buffers, forward, num_slots)
    return None


def _refusal(error: Exception, config: EngineConfig) -> ConfigRefused | None:
    """For a start that would fail in the same way again."""
    reason = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        free, total = torch.cuda.mem_get_info()
        return ConfigRefused(
            f"no GPU memory is left to decode {config.max_num_seqs} sequences at a time: "
            f"{readable(free)} of {readable(total)} are free beside the weights and the KV cache "
            f"({reason}); give a smaller --kv-cache-memory, --adapter-memory or --max-num-seqs"
        )
    from triton import TritonError  # noqa: PLC0415 - it takes a second to load, unless it is there

    if isinstance(error, TritonError):
        return ConfigRefused(
            f"a Triton kernel does not run on this GPU: {reason}; --kernels naive does without"
        )
    return None

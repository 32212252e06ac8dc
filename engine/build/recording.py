"""Records the steps of one engine, and says why an engine whose steps cannot be recorded does not
start."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.worker.forward import Forward
from loraplex.engine.worker.kv_memory import readable
from loraplex.engine.worker.model_runner import RecordedSteps
from loraplex.engine.worker.replay.cuda_graphs import CudaCapture, StepGraphs, ladder
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize
from loraplex.engine.worker.replay.tapes import LARGEST_SAMPLE, StepTapes
from loraplex.kernels.dispatch import NAIVE, is_triton_error
from loraplex.kernels.kernel_set import Kernels, KernelsUnavailable


@torch.inference_mode()
def record_steps(
    config: EngineConfig,
    forward: Forward,
    kv: KVCacheManager,
    kernels: Kernels,
    sizes: Sequence[int] = (),
) -> RecordedSteps | None:
    """Records steps for kernels that can be recorded: on a CPU when they are first needed, on CUDA
    at once.

    Args:
        sizes: rows of the steps to record on CUDA, ascending; all that are of use by default.
    """
    num_slots, num_rows = config.max_adapter_slots, config.max_num_seqs
    if kernels is not NAIVE and forward.device.type == "cuda":
        size = StepSize(num_rows, num_rows, num_rows)
        buffers = StepBuffers(kv, size, num_slots, forward.device)
        capture = CudaCapture(sizes or ladder(num_rows))
        return StepGraphs(buffers, capture, forward, num_slots)
    if kernels.name == "cpu":
        size = StepSize(config.max_num_batched_tokens, num_rows, num_rows)
        buffers = StepBuffers(kv, size.grown(LARGEST_SAMPLE), num_slots, forward.device)
        return StepTapes(buffers, forward, num_slots)
    return None


@contextmanager
def gpu_faults_refused(config: EngineConfig) -> Iterator[None]:
    """Turns GPU faults that would recur at every start into a message that says what to change.

    Raises:
        ConfigRefused: the GPU lacks the memory, or cannot run the kernels.
    """
    try:
        yield
    except Exception as error:
        raise (_refusal(error, config) or error) from error


def _refusal(error: Exception, config: EngineConfig) -> ConfigRefused | None:
    reason = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        free, total = torch.cuda.mem_get_info()
        return ConfigRefused(
            f"the GPU's memory does not hold a step of {config.max_num_batched_tokens:,} tokens "
            f"and {config.max_num_seqs:,} sequences beside the weights and the KV cache: "
            f"{readable(free)} of {readable(total)} are free ({reason}); give a smaller "
            "--max-num-batched-tokens, --max-num-seqs or --kv-cache-memory"
        )
    if isinstance(error, KernelsUnavailable):
        return ConfigRefused(f"{reason}; --kernels naive does without them")
    if is_triton_error(error):
        return ConfigRefused(
            f"a Triton kernel does not run on this GPU: {reason}; --kernels naive does without"
        )
    return None

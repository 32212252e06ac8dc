"""Names everything beside the model's files that the bits of stored keys and values depend on."""

from importlib.metadata import version

import torch

from loraplex.kernels.kernel_set import Kernels
from loraplex.kernels.native.library import build_name


def numerics_of(kernels: Kernels, device: torch.device) -> str:
    """Names the kernels, what they were built from, the libraries they run on and the processor.

    Where it is equal, the same weights and tokens give the same bits; where it differs they may
    not, so blocks of one engine are useless to the other.
    """
    packages = ["loraplex", "torch", "transformers"]
    if kernels.name == "triton":
        packages.append("triton")
    built = build_name() if kernels.name == "cpu" else kernels.name
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    return "; ".join([built, processor, *(f"{name} {version(name)}" for name in packages)])

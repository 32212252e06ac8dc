"""Launch: one kernel as a launch wrapper asked for it, caught before anything is compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with the types, constants and options of one launch."""

    kernel: Any  # triton.JITFunction
    key: str  # equal for launches that share a binary
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]  # what Triton may assume of arguments
    options: dict[str, Any]  # of the compiler

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).strip("_")

    @property
    def numbers(self) -> str:
        """The narrowest floating-point format among the tensors."""
        formats = {str(t).removeprefix("*") for t in self.signature.values()}
        return next(name for name in ("bf16", "fp16", "fp32") if name in formats)

    @property
    def choices(self) -> dict[str, Any]:
        """The constants that the wrapper chose, by name; not the ones Triton saw in arguments."""
        names = self.kernel.arg_names
        declared = set(self.kernel.constexprs)
        found = {names[path[0]]: v for path, v in self.constants.items() if path[0] in declared}
        return {name: getattr(value, "value", value) for name, value in found.items()}

    def compile(self, target: GPUTarget) -> Any:
        """-> triton.compiler.CompiledKernel"""
        source = triton.compiler.ASTSource(
            self.kernel, self.signature, self.constants, self.attributes
        )
        return triton.compile(source, target=target, options=self.options)


class _AbsentGPU:
    """What a launch asks Triton's driver for, answered without a device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def caught_launches(target: GPUTarget) -> Iterator[list[Launch]]:
    """Makes every Triton launch inside the block add itself to a list and do nothing else.

    Tensors on torch's meta device will do: their data is never touched. Equal launches are listed
    once.
    """
    caught: dict[str, Launch] = {}

    def catch(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        name = f"{fn.module}.{fn.name}"
        caught.setdefault(
            f"{name} {key}",
            Launch(
                kernel=fn.jit_function,
                key=f"{name} {key}",
                signature=compile["signature"],
                constants=compile["constants"],
                attributes=compile["configs"][0],
                options={option: compile[option] for option in _OPTIONS},
            ),
        )
        launches[:] = caught.values()
        return True  # Triton's word for: this launch is taken care of

    launches: list[Launch] = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.runtime.driver.set_active(_AbsentGPU(target))
    triton.knobs.runtime.jit_cache_hook = catch
    try:
        yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        triton.runtime.driver._active = None  # found anew when it is needed

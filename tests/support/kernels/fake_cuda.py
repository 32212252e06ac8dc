"""A CUDA device that is not there: its tensors have shapes and a place, and read as zeros.

What lies on the CPU is real, what lies on CUDA is torch's FakeTensor, and an operation that mixes
the two is refused, as CUDA refuses it. Kernels are not run; what they are handed must all lie on
the device. So what an engine does around its kernels is checked for mixed devices without a GPU.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels.triton_interpreter import INTERPRETED
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter, jit

CUDA = torch.device("cuda", 0)
_PROPERTIES = SimpleNamespace(name="none", major=9, minor=0, multi_processor_count=132)
_aten = torch.ops.aten


class MixedDevices(BaseException):
    """Something was handed tensors that do not all lie on the GPU.

    No `Exception`: code that tries something and does without where it fails must not hide this.
    """


class _HostIsReal(TorchDispatchMode):
    """Operations on CPU tensors alone are computed; all others go on to FakeTensorMode."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        if not any(map(_is_on_cuda, leaves)):
            kwargs.pop("pin_memory", None)
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace == "aten" and func._can_decompose():
            with self:  # so that its parts come here, one by one
                return func.decompose(*args, **kwargs)
        if func in _READS:
            return _READS[func](*args)
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return self.__torch_dispatch__(_aten.zero_.default, types, args[:1])
        args, kwargs = tree_map(self._fake, (args, kwargs))
        try:
            return _on_host(func(*args, **kwargs))
        except RuntimeError as error:
            if "different devices" in str(error):
                raise MixedDevices(str(error)) from error
            raise

    def _fake(self, value: Any) -> Any:
        """Without the values that torch would go on computing with."""
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self._fakes.from_tensor(value) if is_real else value


def _is_on_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, FakeTensor)


def _on_host(out: Any) -> Any:
    """What was copied to the host is real there."""
    if isinstance(out, FakeTensor) and out.device.type == "cpu":
        with unset_fake_temporarily():
            return torch.zeros(out.shape, dtype=out.dtype)
    return out


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device:
        raise MixedDevices(f"torch.equal of tensors on {a.device} and {b.device}")
    return True


def _nonzero(x: Tensor) -> Tensor:
    """As if everything were other than zero, so that what is done with it is done."""
    return x.new_empty(x.numel(), x.dim(), dtype=torch.int64)


def _scalar(x: Tensor) -> Any:
    with unset_fake_temporarily():
        return torch.zeros((), dtype=x.dtype).item()


_READS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.equal.default: _equal,
    _aten.nonzero.default: _nonzero,
}


@contextlib.contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator["FakeRuntime"]:
    """Inside, CUDA tensors can be made and handed to kernels, by this thread."""
    runtime = fake_runtime(monkeypatch)

    def interpreted(executor: Any, *args: Any, **options: Any) -> None:
        runtime.launch(executor.fn, args, options)

    def compiled(function: Any, *args: Any, grid: object, warmup: object, **options: Any) -> None:
        runtime.launch(function.fn, args, options)

    if INTERPRETED:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", interpreted)
    else:
        monkeypatch.setattr(jit.JITFunction, "run", compiled)
    with warnings.catch_warnings(), FakeTensorMode() as fakes, _HostIsReal(fakes):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield runtime


def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> "FakeRuntime":
    """Stands in for `torch.cuda` alone: tensors are as they are without it."""
    runtime = FakeRuntime()
    for name, value in runtime.replacements().items():
        monkeypatch.setattr(torch.cuda, name, value)
    return runtime


class FakeStream:
    """Also an event, or a graph: nothing runs, so that nothing is waited for."""

    def _nothing(self, *_: object) -> None:
        pass

    wait_stream = wait_event = synchronize = record = replay = _nothing


class FakeRuntime:
    """What the engine calls of `torch.cuda`, with one current stream."""

    def __init__(self) -> None:
        self.current = FakeStream()
        self.free_bytes = 1 << 28
        self.pinned: dict[int, int] = {}  # bytes by address
        self.binaries: set[str] = set()  # of all kernels that were launched
        self.num_waits = 0  # for the whole device
        self.status = 0  # of what is asked of the driver; 0: it was done

    def replacements(self) -> dict[str, Any]:
        names = ("Stream", "Event", "CUDAGraph", "graph_pool_handle")
        makers: dict[str, Any] = dict.fromkeys(names, FakeStream)
        return makers | {
            "current_stream": lambda *_: self.current,
            "set_stream": self._set_stream,
            "stream": self._stream,
            "graph": self._graph,
            "set_sync_debug_mode": lambda mode: None,
            "synchronize": self._wait,
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (self.free_bytes, 2 * self.free_bytes),
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._pin, cudaHostUnregister=self.pinned.pop
            ),
            "get_device_properties": lambda _: _PROPERTIES,
        }

    def _pin(self, address: int, num_bytes: int, _flags: int) -> int:
        self.pinned[address] = num_bytes
        return self.status

    def _wait(self, *_: object) -> None:
        self.num_waits += 1

    def launch(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Notes a launch; which binary it takes follows from its constants and from what is None.

        Raises:
            MixedDevices: not all tensors lie on the device.
        """
        places = {a.device.type for a in (*args, *options.values()) if isinstance(a, Tensor)}
        if places - {"cuda"}:
            raise MixedDevices(f"{kernel.__name__} was handed tensors on {sorted(places)}")
        constants = {k: v for k, v in options.items() if not isinstance(v, Tensor)}
        self.binaries.add(f"{kernel.__name__} {constants} {[a is None for a in args]}")

    def _set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def _graph(self, _graph: object, *, stream: FakeStream, **_: object) -> Iterator[None]:
        """As torch's, which stays on the stream of a recording that breaks off."""
        before, self.current = self.current, stream
        try:
            yield
        except Exception as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.current = before

    @contextlib.contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def move_to_cuda(model: nn.Module) -> None:
    """Puts a model's parameters and buffers on the device, as its `to` would."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = parameter.data.to(CUDA)
                module._parameters[name] = nn.Parameter(moved, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(CUDA)

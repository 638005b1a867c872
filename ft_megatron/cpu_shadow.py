"""Let unmodified Megatron-Core train on a host without a GPU, by shadowing the ``torch.cuda`` calls it makes.

Megatron assumes CUDA in its first lines: it asks for the current device, seeds the CUDA generator, opens
streams and allocates with ``device="cuda"``. None of that needs a GPU to be meaningful. After `install` such
calls act on the CPU, so the real training code (model, DDP, optimizers, pipeline schedules) runs over gloo.
This is for tests, demonstrations and large-scale emulation; with a real CUDA device `install` does nothing.
What it puts in the place of torch's functions is listed here (`_TORCH_CUDA`), not in `patched`: no job with
a GPU meets it. What it adds to Megatron itself (`cpu_megatron`) is listed there.

Order matters: Megatron takes ``_lazy_call``, ``_lazy_init`` and the tensor types out of ``torch.cuda`` when
it is imported, so call `install` first (or put ``import ft_megatron.cpu_shadow_auto`` on top of a script).

Importing or installing starts no OpenMP thread and runs no tensor operation: a forkserver may preload it.
The device translation is a ``TorchFunctionMode``, which torch keeps per thread; it holds in the thread that
called `install`, and after a fork from that thread.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ft_megatron import cpu_megatron

CPU = torch.device("cpu")

_installed = False


def active() -> bool:
    """Whether ``torch.cuda`` is shadowed in this process: the tensors of the job then live on the CPU."""
    return _installed


def install() -> None:
    """Shadow ``torch.cuda``; does nothing when a real CUDA device is there, or when called again.

    Raises RuntimeError when Megatron was imported before: it then holds the real functions already.
    """
    if _installed or _real_cuda():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "no GPU here, and cpu_shadow.install() came after the first megatron import, which keeps "
            "references to the real torch.cuda: "
            "import ft_megatron.cpu_shadow_auto before anything from megatron"
        )
    _install()


def _real_cuda() -> bool:
    """Ask for CUDA devices without starting the driver, which would make CUDA unusable in forked workers."""
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


def _install() -> None:
    global _installed
    # Megatron decorates its fused functions with torch.compile. Compiling them takes a C++ compiler and tens
    # of seconds in the first step of each rank. torch._dynamo reads this when it is imported.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron refuses tensor parallelism on some devices without it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    for name, shadow in _TORCH_CUDA.items():
        setattr(torch.cuda, name, shadow)
    for name in _RANDOM:
        setattr(torch.cuda.random, name, _TORCH_CUDA[name])
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _returns(None))
    torch.cuda.nvtx.range = _no_range
    # On a CUDA build this asks torch.cuda.is_available, which is true now; data loaders then pin memory.
    torch.accelerator.is_available = _returns(False)

    for owner, name, shadow in (
        (torch.Tensor, "cuda", _itself()),
        (torch.Tensor, "pin_memory", _itself()),
        (torch.Tensor, "record_stream", _returns(None)),
        (torch.nn.Module, "cuda", _itself()),
    ):
        setattr(owner, name, shadow)
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    iterator.__init__ = _leaves_the_generator(iterator.__init__)  # type: ignore[method-assign]
    _OnCpu().__enter__()  # for the rest of the process, as torch.set_default_device does

    # Megatron warns when the CPU generator moves while the CUDA generator is forked for model-parallel
    # dropout: here they are one. The numbers are right: it saves and restores the state around the fork.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_the_cpu_generator)
    cpu_megatron.install()
    _installed = True


# -- devices ---------------------------------------------------------------------------------------


class _OnCpu(TorchFunctionMode):
    """Read every request for a CUDA device as one for the CPU, and call the tensors CUDA tensors."""

    def __torch_function__(  # in each torch call: keep it short
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
            if kwargs.get("pin_memory"):  # torch refuses to pin without a driver
                kwargs = {**kwargs, "pin_memory": False}
        if func is _TENSOR_CPU or (func is _TENSOR_TO and _to_host(*args[1:2], **kwargs or {})):
            copy = func(*args, **kwargs) if kwargs else func(*args)
            return copy.clone() if copy is args[0] else copy
        if func is _TENSOR_TO and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        elif func is _TENSOR_TYPE and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by these names, and know no others.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs) if kwargs else func(*args)


_TENSOR_TO = torch.Tensor.to
_TENSOR_CPU = torch.Tensor.cpu
_TENSOR_TYPE = torch.Tensor.type


def _to_host(device: Any = None, **options: Any) -> bool:
    """Whether ``Tensor.to`` is asked for a copy in host memory.

    It has to be one: Megatron's asynchronous save writes it to disk while training changes the tensor. A
    device object says nothing: those of tensors and `current_device` are the CPU's here.
    """
    return isinstance(device, str) and device == "cpu"


def _on_cpu(device: Any) -> Any:
    """The CPU where `device` names a CUDA device ("cuda:0", an index, a torch.device), else `device`."""
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def _properties(device: Any = None) -> SimpleNamespace:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=memory, multi_processor_count=os.cpu_count() or 1
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


# -- streams and events: work on the CPU is done when the call returns -----------------------------


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU
        self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return 0, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds, as CUDA counts."""
        return (end._time - self._time) * 1e3


class _Device:
    """``torch.cuda.device`` and ``device_of``: a context with nothing to switch."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


_DEFAULT_STREAM = _Stream()


@contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    yield


@contextmanager
def _no_range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


# -- random numbers: the CUDA generator is the CPU's -----------------------------------------------


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that calls torch.cuda.manual_seed_all, which is this function.
    torch.default_generator.manual_seed(int(seed))


class _Generators:
    """``torch.cuda.default_generators``, indexed by a device here and by an int elsewhere: always the CPU's.

    Megatron's ``_set_cuda_rng_state`` writes to it directly, to save a copy.
    """

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _leaves_the_generator(start: Callable[..., None]) -> Callable[..., None]:
    """Have an iterator over a data loader take nothing from the generator that dropout draws from.

    It draws a seed for its workers when it is made. With a GPU that comes from the CPU's generator, so a run
    that loads a checkpoint, and makes its iterators afterwards, goes on with the dropout of the first run.
    """

    @functools.wraps(start)
    def start_apart(*args: Any, **kwargs: Any) -> None:
        state = _get_rng_state()
        start(*args, **kwargs)
        _set_rng_state(state)

    return start_apart


def _not_about_the_cpu_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


# -- the rest --------------------------------------------------------------------------------------


def _returns(value: Any) -> Callable[..., Any]:
    """A function that returns `value` whatever it is given.

    A new one per use: torch._dynamo's tables are keyed by function, and refuse one that has two names.
    """

    def shadow(*args: Any, **kwargs: Any) -> Any:
        return value

    return shadow


def _itself() -> Callable[..., Any]:
    """A method that returns its object, which is on the only device there is."""

    def shadow(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return shadow


def _call_now(callback: Callable[[], None], **kwargs: Any) -> None:
    """``torch.cuda._lazy_call`` queues until CUDA is initialised, which is never here."""
    callback()


_RANDOM = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [_get_rng_state()],
    "set_rng_state_all": lambda states: _set_rng_state(states[0]),
    "manual_seed": _manual_seed,
    "manual_seed_all": lambda seed: _manual_seed(seed),
    "initial_seed": lambda: torch.default_generator.initial_seed(),
}

_TORCH_CUDA: dict[str, Any] = {
    **_RANDOM,
    "default_generators": _Generators(),
    # Start-up, which Megatron also reaches through the private names.
    "init": _returns(None),
    "_lazy_init": _returns(None),
    "_lazy_call": _call_now,
    "is_initialized": _returns(True),
    "is_available": _returns(True),
    # Devices: every process has one, its own.
    "device_count": _returns(1),
    "current_device": _returns(CPU),  # goes to `device=`; the real one is an index
    "set_device": _returns(None),
    "device": _Device,
    "device_of": _Device,
    "get_device_name": _returns("CPU"),
    "get_device_capability": _returns((8, 0)),  # an A100: bf16 is allowed, nothing newer is tried
    "get_device_properties": _properties,
    "is_bf16_supported": _returns(True),
    # Streams and events.
    "Stream": _Stream,
    "Event": _Event,
    "stream": _stream_context,
    "set_stream": _returns(None),
    "current_stream": _returns(_DEFAULT_STREAM),
    "default_stream": _returns(_DEFAULT_STREAM),
    "synchronize": _returns(None),
    "is_current_stream_capturing": _returns(False),
    # Memory statistics, which Megatron logs.
    "memory_allocated": _returns(0),
    "max_memory_allocated": _returns(0),
    "memory_reserved": _returns(0),
    "max_memory_reserved": _returns(0),
    "memory_stats": _returns({}),
    "memory_snapshot": _returns([]),
    "mem_get_info": _mem_get_info,
    "empty_cache": _returns(None),
    "reset_peak_memory_stats": _returns(None),
    "ipc_collect": _returns(None),
    # Legacy tensor types: Megatron makes small tensors with them; Float16Module tests activations for them.
    "FloatTensor": torch.FloatTensor,
    "DoubleTensor": torch.DoubleTensor,
    "HalfTensor": torch.HalfTensor,
    "BFloat16Tensor": torch.BFloat16Tensor,
    "IntTensor": torch.IntTensor,
    "LongTensor": torch.LongTensor,
    "ByteTensor": torch.ByteTensor,
    "BoolTensor": torch.BoolTensor,
}

"""A GPU that is none: streams that do their work as late as they may, events, page-locked memory.

It takes the place of what the engine uses of `torch.cuda`; all else is the engine's own code. What is given
to a stream happens only when it must: when somebody waits for it, or at once where the stream is not `late`.
So whoever forgets to wait reads what is not there yet, every time and not once in a thousand steps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from ft_core.process import stream

DEVICE = torch.device("cuda", 3)
PATIENCE = 60.0


class Stream:
    """Work in its order. `compute`: the one that training uses; otherwise a stream beside it."""

    def __init__(self, gpu: Gpu, compute: bool = False) -> None:
        self.gpu, self.compute = gpu, compute
        self.device = DEVICE if compute else gpu.device_of_thread()
        self.queue: deque[Callable[[], None]] = deque()
        self.issued = self.done = 0

    def run(self, until: int) -> None:
        """Do what was given to it until then."""
        while self.done < until:
            with self.gpu.lock:
                if self.done < until:
                    self.queue.popleft()()
                    self.done += 1

    def synchronize(self) -> None:
        """As torch's."""
        if not self.compute:
            self.gpu.log.append("stream synchronized")
        self.run(self.issued)


class Event:
    """As torch's, not to measure time."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._stream: Stream | None = None
        self._until = 0

    def record(self, stream: Stream) -> None:
        """Stands for what the stream has been given so far."""
        self._stream, self._until = stream, stream.issued
        if stream.compute:
            self._gpu.at_record()
            self._gpu.log.append(("fence", str(stream.device)))

    def synchronize(self) -> None:
        """Until that is done."""
        assert self._stream is not None, "it was never recorded"
        if self._stream.compute:
            self._gpu.at_fence()
        else:
            assert self._gpu.copying.wait(PATIENCE)
        self._stream.run(self._until)
        self._gpu.log.append("fence passed" if self._stream.compute else "copied")


class Gpu:
    """What a test may set: `late` streams ("compute", "side"); `at_record` and `at_fence`, called when the
    compute stream's event is recorded and when somebody waits for it; `copying`, without which the stream
    beside it stands still; `refuse`, the error that locking memory ends with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.late: frozenset[str] = frozenset()
        self.at_record: Callable[[], None] = lambda: None
        self.at_fence: Callable[[], None] = lambda: None
        self.copying = threading.Event()
        self.copying.set()
        self.lock = threading.RLock()
        self._thread = threading.local()
        self.compute = Stream(self, compute=True)
        replaced = {
            "Event": lambda blocking=False: Event(self),
            "Stream": self._new_stream,
            "current_stream": lambda device=None: self.compute,
            "stream": self._using,
            "set_device": self._set_device,
            "device": self._on,
            "is_initialized": lambda: True,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(stream, "has_gpu", lambda: True)
        monkeypatch.setattr(OnDevice, "gpu", self, raising=False)

    def launch(self, work: Callable[[], None], stream: Stream | None = None) -> None:
        """Give work to a stream; without one, to training's."""
        stream = stream or self.compute
        with self.lock:
            stream.queue.append(work)
            stream.issued += 1
        if ("compute" if stream.compute else "side") not in self.late:
            stream.run(stream.issued)

    def current(self) -> Stream:
        """Of this thread."""
        return getattr(self._thread, "stream", self.compute)

    def device_of_thread(self) -> torch.device:
        """The first one, until the thread has said which."""
        return getattr(self._thread, "device", torch.device("cuda", 0))

    def _new_stream(self) -> Stream:
        self.log.append("stream")
        return Stream(self)

    def _set_device(self, device: torch.device) -> None:
        self._thread.device = device
        self.log.append(("device", device, threading.current_thread().name.partition("_")[0]))

    @contextlib.contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        before = self.device_of_thread()
        self._thread.device = device
        yield
        self._thread.device = before

    @contextlib.contextmanager
    def _using(self, stream: Stream) -> Iterator[None]:
        self._thread.stream = stream
        yield
        del self._thread.stream


class OnDevice(torch.Tensor):
    """Says that it is on a GPU. Copies from and to it are given to the thread's current stream."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: DEVICE)
    gpu: ClassVar[Gpu]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone:
            return cls._cloned(args[0])
        if function is torch.Tensor.copy_:
            stream = cls.gpu.current()
            if stream.device != DEVICE:
                raise RuntimeError(f"a tensor on {DEVICE} is copied on a stream of {stream.device}")
            if not stream.compute:
                cls.gpu.log.append("copy")
            to, source = (t.as_subclass(torch.Tensor) for t in args[:2])
            cls.gpu.launch(lambda: to.copy_(source), stream)  # type: ignore[arg-type,return-value]
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def _cloned(cls, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.as_subclass(torch.Tensor)
        memory = torch.empty_like(plain)
        clone = memory.as_subclass(cls)
        cls.gpu.launch(lambda: memory.copy_(plain))  # type: ignore[arg-type,return-value]
        # Without the last reference the allocator may give the memory to others at once.
        weakref.finalize(clone, lambda: memory.view(-1).view(torch.uint8).fill_(0xFF))
        return clone


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """In torch's place for one test."""
    return Gpu(monkeypatch)

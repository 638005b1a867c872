"""What is done on a GPU, in which order. Nobody here has one: a recorder stands in for torch's module."""

from __future__ import annotations

import contextlib
import gc
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core.test_snapshot import Model

from ft_core.adapter import Redundancy, ReplicaGroup, StateTensor
from ft_core.comm.inner import start
from ft_core.errors import EpochChanged
from ft_core.process.inject import ENV as INJECT_ENV
from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import (
    FROM_WORKER,
    TO_WORKER,
    Abort,
    Allocate,
    Allocated,
    Assign,
    BeganWith,
    MembershipChanges,
    Restore,
    Welcome,
    WorkerPlan,
)
from ft_core.protocol.sockets import listen
from ft_core.state.manifest import Segment
from ft_core.state.memory import IN_OPTIMIZER, ControlBlock, Word
from ft_core.state.snapshot import Snapshotter
from ft_core.state.store import RoleMemory
from ft_core.worker import session as session_module
from ft_core.worker.session import Session

SECRET = b"s" * 32
GPU = torch.device("cuda", 3)


class Cuda:
    """As much of `torch.cuda` as snapshots use. `at_fence` is called when the device has come to it."""

    def __init__(self, refuse: int = 0) -> None:
        self.log: list[Any] = []
        self.at_fence: Callable[[], None] = lambda: None
        self.pinned: set[int] = set()
        self._refuse = refuse

    def current_stream(self, device: torch.device) -> str:
        return f"compute of {device}"

    def set_device(self, device: torch.device) -> None:
        self.log.append(("device", device, threading.current_thread().name.partition("_")[0]))

    def Event(self) -> _Event:  # noqa: N802 - torch's name
        return _Event(self)

    def Stream(self) -> _Stream:  # noqa: N802 - torch's name
        self.log.append("stream")
        return _Stream(self)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        stream.current = True
        yield
        stream.current = False

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.pinned |= set() if self._refuse else {pointer}
        return self._refuse

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802 - CUDA's name
        assert str(hex(pointer))[2:] in Path("/proc/self/maps").read_text(), "it is not mapped any more"
        self.pinned.remove(pointer)
        return 0


class _Event:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def record(self, stream: str) -> None:
        self._cuda.log.append(("fence", stream))

    def synchronize(self) -> None:
        self._cuda.log.append("fence passed")
        self._cuda.at_fence()


class _Stream:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.current = cuda, False

    def synchronize(self) -> None:
        self._cuda.log.append("copied")


class OnDevice(torch.Tensor):
    """Says that it is on a GPU, and tells of copies of it."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: GPU)
    cuda: Cuda

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_ and isinstance(args[1], cls) and not isinstance(args[0], cls):
            cls.cuda.log.append("copy")
        return super().__torch_function__(function, types, args, kwargs or {})


class OnGpu(Model):
    def tensors(self) -> Iterator[StateTensor]:
        for t in super().tensors():
            yield StateTensor(t.name, t.tensor.as_subclass(OnDevice), t.holders, t.volatile)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(OnDevice, "cuda", found, raising=False)
    return found


def snapshots(
    cuda: Cuda, memory: RoleMemory, moved: Callable[[], bool] = lambda: False
) -> tuple[Model, Snapshotter]:
    model = OnGpu()

    def allocate(slot: int, segments: Any) -> list[int]:
        return memory.allocate(slot, segments).memory.address

    def staged(version: int) -> None:
        [(_, buffer)] = [memory.find(version) or pytest.fail("it is said before it is so")]
        cuda.log.append(("staged", buffer.version))

    def asked() -> bool:
        cuda.log.append("epoch")
        return moved()

    return model, Snapshotter(model, allocate, staged, moved=asked, cuda=cuda)


def test_a_copy_from_a_gpu_has_its_order(cuda: Cuda) -> None:
    _, snapshotter = snapshots(cuda, RoleMemory())
    for version in (1, 2):
        cuda.log.clear()
        snapshotter.stage(version)
        snapshotter.wait()
        log = [entry for entry in cuda.log if entry not in ("copy", "copied", "stream")]
        assert log == [
            ("fence", "compute of cuda:3"),
            ("device", GPU, "ft-d2h"),
            "fence passed",
            "epoch",
            ("staged", version),
        ]
        assert [entry for entry in cuda.log if entry == "stream"] == ["stream"] * (version == 1)
        last_copy = max(i for i, entry in enumerate(cuda.log) if entry == "copy")
        assert cuda.log.index("copy") > cuda.log.index("epoch")
        assert last_copy < len(cuda.log) - 2 and cuda.log[-2:] == ["copied", ("staged", version)]


def test_what_an_aborted_exchange_left_is_no_version(cuda: Cuda) -> None:
    """The epoch ends while the device is still busy with the step that made the state."""
    over = threading.Event()
    memory = RoleMemory()
    model, snapshotter = snapshots(cuda, memory, over.is_set)
    snapshotter.stage(1)
    snapshotter.wait()
    slot, buffer = memory.find(1) or pytest.fail("there is no copy")
    right = model.shard.clone()
    model.step(snapshotter)
    model.shard.fill_(float("nan"))  # the garbage
    cuda.at_fence = over.set
    snapshotter.stage(2)
    snapshotter.wait()
    assert "copy" not in cuda.log[cuda.log.index("epoch", cuda.log.index(("staged", 1))) :]
    assert memory.versions() == [1] and memory.find(2) is None
    over.clear()
    cuda.at_fence = lambda: None
    # Nor is the framework's own state taken for that version, should others have it.
    assert snapshotter._live is None
    snapshotter.load(slot, buffer.memory.address, buffer.segments, 1)
    assert torch.equal(model.shard, right)


def test_memory_is_unlocked_before_it_is_unmapped(cuda: Cuda) -> None:
    model, snapshotter = snapshots(cuda, RoleMemory())
    for version in range(4):
        model.late = torch.ones(version + 1)  # another layout, so other memory
        snapshotter.stage(version)
        snapshotter.wait()
        gc.collect()
        assert len(cuda.pinned) == min(version + 1, 2)
    del snapshotter
    gc.collect()
    assert not cuda.pinned


def test_memory_that_cannot_be_locked_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda(refuse=2)
    monkeypatch.setattr(OnDevice, "cuda", cuda, raising=False)
    memory = RoleMemory()
    _, snapshotter = snapshots(cuda, memory)
    snapshotter.stage(1)
    snapshotter.wait()
    assert memory.versions() == [1]
    assert "cannot be page-locked (CUDA error 2)" in caplog.text and "ulimit -l" in caplog.text
    del snapshotter
    gc.collect()


class Trained(Model):
    """What a session asks of a framework, beside the state."""

    replica_group = ReplicaGroup(0, 1, Redundancy.SHARDED)

    def adopt(self, roles: Any) -> dict[int, Any]:
        return {}


class Agent:
    """As much of an agent as a session needs to train alone."""

    def __init__(self, job_dir: Path) -> None:
        self._memory, self._control = RoleMemory(), ControlBlock.create()
        self._sock = listen(f"unix:\0ft-test-{uuid.uuid4().hex}")
        thread = start("agent", self._serve)
        channel = Channel.connect("unix:" + self._sock.getsockname().decode(), SECRET, TO_WORKER, 60)
        channel.settimeout(None)
        self.session = Session(channel, SECRET, job_dir, 0)
        self.session.wait_for_role()
        self._thread = thread

    def _serve(self) -> None:
        self.channel = Channel.accept(self._sock.accept()[0], SECRET, FROM_WORKER)
        self.channel.recv()
        self.channel.send(Welcome(self._control.memory.address))
        plan = WorkerPlan(
            epoch=1,
            store="127.0.0.1:1",
            version=None,
            origin="initial",
            completed={},
            parts=0,
            started_over=0,
            absent={},
            adopted={},
            newcomers=[],
            membership=MembershipChanges(1),
            policy="hold",
            lr_intervention="none",
            began_with=BeganWith(1, 1, 1),
        )
        self.channel.send(Assign(0, 1, {INJECT_ENV: ""}, plan))
        self.channel.send(Restore(1, None, []))
        with contextlib.suppress(ConnectionError):
            while True:
                message = self.channel.recv()
                if isinstance(message, Allocate):
                    segments = [Segment.of(layout) for layout in message.segments]
                    buffer = self._memory.allocate(message.slot, segments)
                    self.channel.send(Allocated(message.id, buffer.memory.address))


def test_the_optimizer_begins_once_the_device_has_passed_the_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch ends while the host waits for the norm: an aborted reduction has ended like any other."""
    monkeypatch.setattr(session_module, "_current", None)  # put back at the end
    agent = Agent(tmp_path)
    session, model = agent.session, Trained()
    session.begin(model, 0, lambda: None)
    waited: list[int] = []
    monkeypatch.setattr(session_module, "settle", lambda: waited.append(session.control[Word.TAG]))
    session.optimizer_begins()
    session.optimizer_begins()  # of another part of the parameters
    assert waited == [0] and session.control[Word.TAG] == IN_OPTIMIZER
    session.step_done()
    assert session.control[Word.TAG] == 1

    def aborted() -> None:
        agent.channel.send(Abort(2))
        with session._condition:
            assert session._condition.wait_for(lambda: session._pending == 2, 60)

    monkeypatch.setattr(session_module, "settle", aborted)
    with pytest.raises(EpochChanged, match="epoch 2 was announced"):
        session.optimizer_begins()
    assert session.control[Word.TAG] == 1, "the state has not changed"

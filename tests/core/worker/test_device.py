"""What is done on a GPU, in which order. Nobody here has one: a recorder stands in for torch's module."""

from __future__ import annotations

import contextlib
import gc
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from core.models import Model
from core.plans import worker_plan
from core.worker.simulated_gpu import DEVICE, Gpu, OnDevice, gpu

from ft_core.adapter import Redundancy, ReplicaGroup, StateTensor
from ft_core.comm.inner import start
from ft_core.control.liveness.strikes import RULES, Counts, Retry
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
    Fault,
    MembershipChanges,
    Message,
    Restore,
    Staged,
    Welcome,
)
from ft_core.protocol.sockets import listen
from ft_core.state import device_copy
from ft_core.state.checksums import verify
from ft_core.state.device_copy import PIECE, PIECES
from ft_core.state.manifest import CHUNK, Segment
from ft_core.state.memory import IN_OPTIMIZER, ControlBlock, Word
from ft_core.state.snapshot import Snapshotter
from ft_core.state.store import RoleMemory
from ft_core.worker import recovery as recovery_module
from ft_core.worker import session as session_module
from ft_core.worker.session import Session
from ft_core.worker.shell import WorkerShell

__all__ = ["gpu"]  # a fixture
SECRET = b"s" * 32


class OnGpu(Model):
    def tensors(self) -> Iterator[StateTensor]:
        for t in super().tensors():
            yield StateTensor(t.name, t.tensor.as_subclass(OnDevice), t.holders, t.volatile)


Snapshots = Callable[..., tuple[Model, Snapshotter]]


@pytest.fixture
def snapshots(gpu: Gpu) -> Iterator[Snapshots]:
    """A model on the GPU and what copies it; what that has locked is unlocked before the GPU goes."""
    threads = []

    def made(
        memory: RoleMemory, epoch_is_over: Callable[[], bool] = lambda: False
    ) -> tuple[Model, Snapshotter]:
        model = OnGpu()

        def allocate(slot: int, segments: Any) -> list[int]:
            return memory.allocate(slot, segments).memory.address

        def staged(version: int) -> None:
            [(_, buffer)] = [memory.find(version) or pytest.fail("it is said before it is so")]
            gpu.log.append(("staged", buffer.version))

        def asked() -> bool:
            gpu.log.append("epoch")
            return epoch_is_over()

        snapshotter = Snapshotter(model, allocate, staged, epoch_is_over=asked)
        threads.append(snapshotter._thread)
        return model, snapshotter

    yield made
    for thread in threads:
        thread.shutdown()
    gc.collect()


def test_a_copy_from_a_gpu_has_its_order(gpu: Gpu, snapshots: Snapshots) -> None:
    _, snapshotter = snapshots(RoleMemory())
    for version in (1, 2):
        gpu.log.clear()
        snapshotter.stage(version)
        snapshotter.wait()
        log = [entry for entry in gpu.log if entry not in ("copy", "copied", "stream")]
        assert log == [
            ("fence", "cuda:3"),
            ("device", DEVICE, "ft-d2h"),
            "fence passed",
            "epoch",
            ("staged", version),
        ]
        assert [entry for entry in gpu.log if entry == "stream"] == ["stream"] * (version == 1)
        last_copy = max(i for i, entry in enumerate(gpu.log) if entry == "copy")
        assert gpu.log.index("copy") > gpu.log.index("epoch")
        assert last_copy < len(gpu.log) - 2 and gpu.log[-2:] == ["copied", ("staged", version)]


def test_what_an_aborted_exchange_left_is_no_version(gpu: Gpu, snapshots: Snapshots) -> None:
    """The epoch ends while the device is still busy with the step that made the state."""
    over = threading.Event()
    memory = RoleMemory()
    model, snapshotter = snapshots(memory, over.is_set)
    snapshotter.stage(1)
    snapshotter.wait()
    slot, buffer = memory.find(1) or pytest.fail("there is no copy")
    right = model.shard.clone()
    model.step(snapshotter)
    model.shard.fill_(float("nan"))  # the garbage
    gpu.at_fence = over.set
    snapshotter.stage(2)
    snapshotter.wait()
    assert "copy" not in gpu.log[gpu.log.index("epoch", gpu.log.index(("staged", 1))) :]
    assert memory.versions() == [1] and memory.find(2) is None
    over.clear()
    gpu.at_fence = lambda: None
    # Nor is the framework's own state taken for that version, should others have it.
    assert snapshotter._live is None
    snapshotter.load(slot, buffer.memory.address, buffer.segments, 1)
    assert torch.equal(model.shard, right)


def test_memory_is_locked_once(gpu: Gpu, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the layout: a few pieces, and none to load."""
    asked: list[int] = []
    monkeypatch.setattr(device_copy, "locked", lambda n: asked.append(n) or torch.empty(n, dtype=torch.uint8))
    memory = RoleMemory()
    model, snapshotter = snapshots(memory)
    for version in range(4):
        model.late = torch.ones(version + 1)  # another layout, so other memory
        snapshotter.stage(version)
        snapshotter.wait()
        assert asked == [PIECE * PIECES]
    slot, buffer = memory.find(3) or pytest.fail("there is no copy")
    _, successor = snapshots(memory)
    successor.load(slot, buffer.memory.address, buffer.segments, 3)
    assert asked == [PIECE * PIECES]


def test_items_go_through_pieces_of_any_size(
    gpu: Gpu, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are in several pieces, some pieces have several; every chunk has its checksum."""
    monkeypatch.setattr(device_copy, "PIECE", CHUNK)
    memory = RoleMemory()
    model, snapshotter = snapshots(memory)
    model.late = torch.randn(3 * CHUNK // 4 + 5)
    model.shard = torch.randn(2 * CHUNK + 1)
    for version in range(3):
        model.shard += 1
        snapshotter.stage(version)
        snapshotter.wait()
        _, buffer = memory.find(version) or pytest.fail("there is no copy")
        verify(buffer)
        assert sum(segment.chunks for segment in buffer.segments) > 10
    found = {
        item.name: bytes(buffer.data(index)[item.offset : item.offset + item.nbytes])
        for index, segment in enumerate(buffer.segments)
        for item in segment.items
    }
    for each in model.tensors():
        flat = each.tensor.as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8)  # type: ignore[arg-type]
        assert found[each.name] == flat.numpy().tobytes(), each.name


def test_state_on_the_host_locks_no_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "locked", lambda n: pytest.fail("it locks memory"))
    memory = RoleMemory()
    snapshotter = Snapshotter(
        Model(), lambda slot, s: memory.allocate(slot, s).memory.address, gpu.log.append
    )
    snapshotter.stage(1)
    snapshotter.wait()
    assert gpu.log == [1]


def test_memory_that_cannot_be_locked_is_told_of(
    gpu: Gpu, snapshots: Snapshots, caplog: pytest.LogCaptureFixture
) -> None:
    """Here none can, as there is no driver."""
    memory = RoleMemory()
    _, snapshotter = snapshots(memory)
    snapshotter.stage(1)
    snapshotter.wait()
    assert memory.versions() == [1]
    assert "cannot be page-locked" in caplog.text and "ulimit -l" in caplog.text


class Trained(Model):
    """What a session asks of a framework, beside the state."""

    replica_group = ReplicaGroup(0, 1, Redundancy.SHARDED)

    def adopt(self, roles: Any) -> dict[int, Any]:
        return {}


class Agent:
    """As much of an agent as a session needs to train alone."""

    def __init__(self, job_dir: Path, **plan: Any) -> None:
        """`plan`: what the worker's is, beside one that begins a job of one role."""
        self.memory, self._control, self._plan = RoleMemory(), ControlBlock.create(), plan
        self._sock = listen(f"unix:\0ft-test-{uuid.uuid4().hex}")
        thread = start("agent", self._serve)
        channel = Channel.connect("unix:" + self._sock.getsockname().decode(), SECRET, TO_WORKER, 60)
        channel.settimeout(None)
        self.shell = WorkerShell(channel, SECRET, job_dir, 0)
        self.shell.wait_for_role()
        self.session = Session(self.shell)
        self._thread = thread

    def staged(self, version: int) -> None:
        """A copy is said to be complete."""

    def hears(self, message: Message) -> None:
        """What the worker says."""

    def _serve(self) -> None:
        self.channel = Channel.accept(self._sock.accept()[0], SECRET, FROM_WORKER)
        self.channel.recv()
        self.channel.send(Welcome(self._control.memory.address))
        plan = worker_plan(
            membership=MembershipChanges(1),
            policy="hold",
            lr_intervention="none",
            began_with=BeganWith(1, 1, 1),
            **self._plan,
        )
        self.channel.send(Assign(0, {INJECT_ENV: ""}, plan))
        self.channel.send(Restore(1, None, []))
        with contextlib.suppress(ConnectionError):
            while True:
                message = self.channel.recv()
                self.hears(message)
                if isinstance(message, Allocate):
                    segments = [Segment.of(layout) for layout in message.segments]
                    buffer = self.memory.allocate(message.slot, segments)
                    self.channel.send(Allocated(message.id, buffer.memory.address))
                elif isinstance(message, Staged):
                    self.staged(message.version)
                    self._control[Word.COMMITTED] = message.version


def test_the_optimizer_begins_once_the_device_has_passed_the_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch ends while the host waits for the norm: an aborted reduction has ended like any other."""
    agent = Agent(tmp_path)
    session, model = agent.session, Trained()
    session.begin(model, 0, lambda: None)
    waited: list[int] = []
    monkeypatch.setattr(session_module, "settle", lambda: waited.append(agent.shell.control[Word.TAG]))
    session.optimizer_begins()
    session.optimizer_begins()  # of another part of the parameters
    assert waited == [0] and agent.shell.control[Word.TAG] == IN_OPTIMIZER
    session.step_done()
    assert agent.shell.control[Word.TAG] == 1

    def aborted() -> None:
        agent.channel.send(Abort(2))
        shell = agent.shell
        with shell._condition:
            assert shell._condition.wait_for(lambda: shell.machine.announced == 2, 60)

    monkeypatch.setattr(session_module, "settle", aborted)
    with pytest.raises(EpochChanged, match="epoch 2 was announced"):
        session.optimizer_begins()
    assert agent.shell.control[Word.TAG] == 1, "the state has not changed"


def test_a_device_that_fails_while_an_epoch_ends_costs_its_worker_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted broadcast leaves garbage, which may be taken for indices: nobody is to blame for that."""
    agent = Agent(tmp_path)
    session = agent.session
    session.begin(Trained(), 0, lambda: None)
    recovery = session._recovery
    assert recovery is not None

    def failed() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    class Replaced(Exception):  # noqa: N818 - the process would end
        pass

    said: list[tuple[str, Fault]] = []

    def replace(reason: str, fault: Fault = Fault.TERMINATED) -> NoReturn:
        said.append((reason, fault))
        raise Replaced

    monkeypatch.setattr(recovery_module, "drain", failed)
    monkeypatch.setattr(agent.shell, "replace", replace)
    with pytest.raises(Replaced):
        recovery.quiesce()
    reason, fault = said[0]
    assert reason.startswith("its device has failed while an epoch ended: CUDA error: device-side assert")
    assert RULES[fault] == (Retry.YES, Counts.NO)

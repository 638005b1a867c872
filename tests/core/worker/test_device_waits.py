"""Each wait between a GPU's streams and the host, on a GPU that does everything as late as it may.

A real session trains on it: its state is staged after every step, and what is said to be staged is compared
with what the step made. Then each wait is taken away in turn, and the comparison must fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core.worker.simulated_gpu import DEVICE, Event, Gpu, OnDevice, Stream, gpu
from core.worker.test_device import Agent
from waiting import wait_for_value

from ft_core.adapter import Redundancy, ReplicaGroup, StateTensor
from ft_core.errors import EpochChanged
from ft_core.protocol.messages import Abort
from ft_core.state.memory import IN_OPTIMIZER, SnapshotBuffer, Word
from ft_core.worker import session as session_module
from ft_core.worker.session import Session

__all__ = ["gpu"]  # a fixture
STEPS = 4
SCHEDULES = {
    "the step lags behind": frozenset({"compute"}),
    "the copy lags behind": frozenset({"side"}),
    "both lag behind": frozenset({"compute", "side"}),
    "nothing lags behind": frozenset[str](),
}


class Trained:
    """State on the simulated GPU: weights that the optimizer changes, and a statistic of the forward pass."""

    ring = (0,)
    replica_group = ReplicaGroup(0, 1, Redundancy.SHARDED)

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.weight, self.statistic = torch.zeros(5000), torch.zeros(7)

    def tensors(self) -> Iterator[StateTensor]:
        yield StateTensor("weight", self.weight.as_subclass(OnDevice), (0,))
        yield StateTensor("statistic", self.statistic.as_subclass(OnDevice), (0,), volatile=True)

    def envelope(self) -> dict[str, Any]:
        return {}

    def envelope_holders(self) -> tuple[int, ...]:
        return (0,)

    def restore(self, tensors: Any, envelope: Any) -> None:
        raise AssertionError("nothing fails here")

    def adopt(self, roles: Any) -> dict[int, Any]:
        return {}

    def reset(self) -> None:
        pass

    def forward(self) -> None:
        """Changes what may change before the optimizer steps."""
        self._gpu.launch(lambda: self.statistic.add_(2))  # type: ignore[arg-type,return-value]

    def step(self) -> None:
        """The optimizer's."""
        self._gpu.launch(lambda: self.weight.add_(1))  # type: ignore[arg-type,return-value]


class Checking(Agent):
    """Compares what is said to be staged with what it must be."""

    def __init__(self, job_dir: Path) -> None:
        self.wrong: list[str] = []
        self.versions: list[int] = []
        super().__init__(job_dir)

    def staged(self, version: int) -> None:
        """Version v has seen v steps, each of one forward pass."""
        found = self.memory.find(version)
        if found is None:
            self.wrong.append(f"version {version} is overwritten before it is committed")
        else:
            self._compare(version, found[1])
        self.versions.append(version)  # now, since who waits for it looks at what was wrong

    def _compare(self, version: int, buffer: SnapshotBuffer) -> None:
        for index, segment in enumerate(buffer.segments):
            flat = torch.frombuffer(bytearray(buffer.data(index)), dtype=torch.uint8)
            for item in segment.items:
                if item.name in ("weight", "statistic"):
                    content = flat[item.offset : item.offset + item.nbytes].view(torch.float32)
                    right = float(version) * (2 if item.name == "statistic" else 1)
                    if not bool((content == right).all()):
                        self.wrong.append(f"{item.name} of version {version}: {content.unique().tolist()}")


def train(gpu: Gpu, job_dir: Path) -> list[str]:
    """What is wrong with what was staged."""
    agent = Checking(job_dir)
    session, model = agent.session, Trained(gpu)
    gpu.at_record = gpu.copying.clear
    session.begin(model, 0, lambda: None)
    try:
        for _ in range(STEPS):
            model.forward()  # beside the copy
            session.commit_wait()
            session.optimizer_begins()
            model.step()
            gpu.copying.set()  # at the latest: who has not waited has spoiled it by now
            session.step_done()
        gpu.copying.set()
        wait_for_value(lambda: agent.versions, list(range(STEPS + 1)))
    except RuntimeError as error:
        return [str(error)]
    finally:
        gpu.copying.set()
    return agent.wrong


@pytest.fixture(autouse=True)
def waits(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy goes on when the host waits for it, and not before."""
    original = Session.commit_wait

    def commit_wait(self: Session) -> None:
        gpu.copying.set()
        original(self)

    monkeypatch.setattr(Session, "commit_wait", commit_wait)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_staged_is_what_the_step_made(gpu: Gpu, tmp_path: Path, schedule: str) -> None:
    gpu.late = SCHEDULES[schedule]
    assert train(gpu, tmp_path) == []


def _no_wait(of_compute: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Who waits for an event of that stream goes on at once."""
    original = Event.synchronize

    def synchronize(self: Event) -> None:
        if self._stream is None or self._stream.compute != of_compute:
            original(self)

    return lambda patch: patch.setattr(Event, "synchronize", synchronize)


def _recorded_early(patch: pytest.MonkeyPatch) -> None:
    """Before the step's last write."""
    original = Event.record

    def record(self: Event, stream: Stream) -> None:
        original(self, stream)
        self._until = max(0, self._until - 2)  # the clone of the statistic, and the step

    patch.setattr(Event, "record", record)


def _no_commit_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "commit_wait", lambda self: None)


def _no_clone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OnDevice, "_cloned", lambda tensor: tensor)


def _no_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "set_device", lambda device: None)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "the copy does not wait for the step": (_no_wait(of_compute=True), "the step lags behind"),
    "it waits for less than the step": (_recorded_early, "the step lags behind"),
    "a copy under way is said to be complete": (_no_wait(of_compute=False), "the copy lags behind"),
    "the optimizer does not wait for the copy": (_no_commit_wait, "the copy lags behind"),
    "the forward pass changes what is copied": (_no_clone, "the copy lags behind"),
    "the copying thread is on another device": (_no_device, "nothing lags behind"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_without_a_wait_it_is_something_else(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    take_away, schedule = MUTATIONS[mutation]
    gpu.late = SCHEDULES[schedule]
    take_away(monkeypatch)
    assert train(gpu, tmp_path) != []


@pytest.mark.parametrize("waits_for_the_device", [True, False])
def test_the_optimizer_does_not_begin_on_an_aborted_exchange(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for_the_device: bool
) -> None:
    """The abort comes while the device is at it, and it ends with garbage. Else it goes on."""
    gpu.late = SCHEDULES["the step lags behind"]
    agent = Checking(tmp_path)
    session, model = agent.session, Trained(gpu)
    session.begin(model, 0, lambda: None)
    session.commit_wait()
    if not waits_for_the_device:
        monkeypatch.setattr(session_module, "settle", lambda: None)
    aborted = threading.Event()

    def exchange() -> None:
        agent.channel.send(Abort(2))
        shell = agent.shell
        with shell._condition:
            assert shell._condition.wait_for(lambda: shell.machine.announced == 2, 60)
        aborted.set()

    gpu.launch(exchange)
    if waits_for_the_device:
        with pytest.raises(EpochChanged, match="epoch 2 was announced"):
            session.optimizer_begins()
        assert aborted.is_set() and agent.shell.control[Word.TAG] == 0, "the state has not changed"
    else:
        session.optimizer_begins()
        assert not aborted.is_set() and agent.shell.control[Word.TAG] == IN_OPTIMIZER
        gpu.compute.synchronize()


def test_the_device_is_the_one_that_the_state_is_on(gpu: Gpu, tmp_path: Path) -> None:
    assert train(gpu, tmp_path) == []
    streams = [entry for entry in gpu.log if isinstance(entry, tuple) and entry[0] == "device"]
    assert set(streams) == {("device", DEVICE, "ft-d2h")}

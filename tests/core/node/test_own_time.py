"""What an agent reads beside the progress of its roles: their own time in a step, in the flight record; the
loss; and errors of GPUs, in the kernel's log."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_core.comm import flight as recording
from ft_core.comm.flight import FlightRecorder
from ft_core.comm.flight_memory import SLOTS
from ft_core.node.devices.xids import Xids
from ft_core.node.workers.own_time import EVERY, STEPS, OwnTime, OwnTimes, own_time
from ft_core.protocol.groups import GroupId
from ft_core.state.memory import ControlBlock, Word, loss_of, word_of_loss

SECOND = 10**9


class Role:
    """A worker's side, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        monkeypatch.setattr(recording.time, "monotonic_ns", lambda: int(self.now * SECOND))
        self.control = ControlBlock.create()
        self.recorder = FlightRecorder(0, self.control.flight)
        self.recorder.begins(1)
        self.group = self.recorder.add(GroupId.of((0, 1), 0), (0, 1))
        self.recorder.step, self.epoch, self._began = 0, 1, self.now

    def begin(self) -> int:
        return self.recorder.begin(self.group, self.epoch, "allreduce", ([torch.zeros(6)], None))

    def waits(self, seconds: float) -> None:
        slot = self.begin()
        self.now += seconds
        self.recorder.end(slot)

    def done(self, data: float = 0.0, copies: float = 0.0) -> None:
        """Of the step's time, so much was spent waiting for data, and for copies."""
        self.control[Word.DATA_NS] = int(data * SECOND)
        self.control[Word.COPIES_NS] = int(copies * SECOND)
        self.control[Word.STEP_NS] = int((self.now - self._began) * SECOND)
        self.control[Word.VERSION] += 1
        self.recorder.step, self._began = self.control[Word.VERSION], self.now

    def step(self, own: float, waits: float) -> None:
        self.now += own / 2
        self.waits(waits)
        self.now += own / 2
        self.done()


def own_seconds(control: ControlBlock) -> float | None:
    found = own_time(control)
    return None if found is None else found.computing


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Role:
    return Role(monkeypatch)


def test_what_is_waited_for_is_not_its_own(role: Role) -> None:
    assert own_seconds(role.control) is None
    role.step(0.5, 0.25)
    assert own_seconds(role.control) == pytest.approx(0.5)
    role.waits(9.0)  # of the next step
    assert own_seconds(role.control) == pytest.approx(0.5)
    role.done()
    assert own_seconds(role.control) == 0.0
    role.now += 2.0
    role.done()
    assert own_seconds(role.control) == pytest.approx(2.0), "it was alone"


def test_a_step_whose_operations_are_all_overwritten_is_not_its_own(role: Role) -> None:
    role.step(0.5, 0.25)
    for _ in range(SLOTS + 1):  # of the next step
        role.waits(0.001)
    assert own_seconds(role.control) is None


def test_waiting_for_data_and_for_copies_is_not_computing(role: Role) -> None:
    role.now += 1.0
    role.waits(0.5)
    role.done(data=0.25, copies=0.5)
    assert own_time(role.control) == pytest.approx((0.25, 0.25))
    role.now += 2.0
    role.done(data=1.5)
    assert own_time(role.control) == pytest.approx((0.5, 1.5)), "it was alone"


def test_operations_side_by_side_are_waited_for_once(role: Role) -> None:
    role.now += 1.0
    outer = role.begin()
    role.now += 1.0
    role.waits(1.0)
    role.now += 1.0
    role.recorder.end(outer)
    role.now += 0.5
    role.begin()  # and is under way when the step is done
    role.done()
    assert own_seconds(role.control) == pytest.approx(1.5)


def test_a_step_whose_beginning_is_overwritten_is_not_judged(role: Role) -> None:
    role.step(1.0, 1.0)
    for _ in range(SLOTS):
        role.waits(0.001)
    role.done()
    assert own_seconds(role.control) is None
    role.step(1.0, 1.0)
    assert own_seconds(role.control) == pytest.approx(1.0)


def test_it_is_told_when_it_is_known_and_when_it_changes(role: Role) -> None:
    now = 0.0
    times = OwnTimes(lambda: now)

    def steps(*own: float) -> list[float]:
        nonlocal now
        told = []
        for each in own:
            role.step(each, 0.5)
            now += EVERY
            told.append(times.of(7, role.control).computing)
        return told

    times.of(7, role.control)
    assert steps(*[0.5] * (STEPS + 1)) == [0.0] * STEPS + [0.5]
    assert steps(0.504, 30.0, 0.5, 0.503, 0.5) == [0.5] * 5, "a checkpoint, and what is not notable"
    assert steps(0.9, 0.9, 0.9)[-1] == pytest.approx(0.9)
    role.epoch = 2
    role.recorder.begins(2)
    assert steps(5.0) == [0.0], "in this step there was a recovery"
    assert steps(*[0.4] * STEPS)[-1] == pytest.approx(0.4)
    times.forget(7)
    assert times.of(7, role.control) == OwnTime(0.0, 0.0)


def test_errors_of_gpus_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1, before\n")
    xids = Xids(str(log))
    assert xids.counts() == {}
    with log.open("a") as file:
        file.write(
            "4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off\n"
        )
        file.write("4,3,3,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1234, Graphics Exception\n")
        file.write("4,4,4,-;NVRM: GPU at PCI:0000:3b:00: GPU-1234\n6,5,5,-;something else: 12\n")
    assert xids.counts() == {79: 1, 13: 1} == xids.counts()
    with log.open("a") as file:
        file.write("4,6,6,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n")
    assert xids.counts() == {79: 2, 13: 1}
    assert Xids(str(tmp_path / "none")).counts() == {}, "it may not be read"


def test_a_loss_is_a_number_or_none(role: Role) -> None:
    assert loss_of(role.control[Word.LOSS]) is None
    for loss in (2.5, -1e-300, 0.0):
        role.control[Word.LOSS] = word_of_loss(loss)
        assert loss_of(role.control[Word.LOSS]) == loss
    for loss in (float("nan"), float("inf"), -float("inf")):
        role.control[Word.LOSS] = word_of_loss(loss)
        assert loss_of(role.control[Word.LOSS]) is None

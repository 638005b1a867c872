"""What is said of operations that go on after they were waited for. The backend is a stand-in for NCCL."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from waiting import wait_for_value

from ft_core.comm.collectives import Call
from ft_core.comm.inner import Inner
from ft_core.comm.process_group import Communicators
from ft_core.comm.works import FtWork
from ft_core.errors import EpochChanged
from ft_core.node.workers.flight import Recorded, read
from ft_core.protocol.groups import GroupId
from ft_core.state.memory import ControlBlock


class Work:
    """Its `wait` returns at once, as NCCL's does."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Nccl(Inner):
    """`inner`: as if it were open."""

    def __init__(self, epoch: int = 1, timeout: float = 600) -> None:
        super().__init__(
            GroupId.of((0, 1), 0), (0, 1), 0, {"cuda": "nccl"}, timedelta(seconds=timeout), None, epoch, None
        )
        self.pg, self.work = self, Work()
        self.ready, self.returns_work = True, True
        self.depth = 0
        self.fails_with: Exception | None = None
        self.error_of_link = ""

    def allreduce(self, *_: Any) -> Work | None:
        return self.work if self.returns_work else None

    def send(self, *_: Any) -> None:
        """Between begin and end of coalescing."""
        assert self.depth == 1
        if self.fails_with is not None:
            raise self.fails_with

    def _start_coalescing(self, _: torch.device) -> None:
        self.depth += 1

    def _end_coalescing(self, _: torch.device) -> Work:
        self.depth -= 1
        return self.work

    def marker(self) -> Callable[[], bool]:
        done = self.work.done  # as an event has it: not the work
        return done.is_set

    def link_error(self) -> str:
        return self.error_of_link


@pytest.fixture
def control() -> ControlBlock:
    return ControlBlock.create()


@pytest.fixture
def comms(control: ControlBlock) -> Communicators:
    found = Communicators(0, 2, lambda reason: None, b"s", failure_grace=0.1, flight=control.flight)
    found.epoch = 1
    found.flight.begins(1)
    return found


def launched(comms: Communicators, inner: Inner) -> FtWork | None:
    return comms.launch(inner, [Call("allreduce", "allreduce", ([],), {})], ())


def under_way(control: ControlBlock) -> list[str]:
    """By the flight record."""
    return [record.kind for record in read(Recorded(None, control), False).records if record.under_way]


@pytest.mark.parametrize("how", ["waited for", "dropped", "ordered by the backend"])
def test_traffic_lasts_as_long_as_the_device_is_at_it(comms: Communicators, how: str) -> None:
    words: list[int] = []
    comms.traffic = words.append
    first, second = Nccl(), Nccl()
    for inner in (first, second):
        inner.returns_work = how != "ordered by the backend"
        work = launched(comms, inner)
        assert (work is None) != inner.returns_work
        if how == "waited for":
            assert isinstance(work, FtWork) and work.wait()
        del work
    first.work.done.set()
    wait_for_value(lambda: comms._in_flight, 1)
    assert words == [1]
    second.work.done.set()
    wait_for_value(lambda: words, [1, 0])


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("how", ["waited for", "dropped", "ordered by the backend"])
def test_the_flight_record_of_an_operation_ends_with_it(
    comms: Communicators, control: ControlBlock, how: str, asynchronous: bool
) -> None:
    """On the device, and without one: a collective goes on that nobody waits for."""
    group, inner = comms.create((0, 1), "nccl", timedelta(seconds=9), dist.HashStore(), None), Nccl()
    group.inner, inner.asynchronous = inner, asynchronous
    comms.startup.recording = False
    inner.returns_work = how != "ordered by the backend"
    work = group.allreduce([torch.zeros(1)], None)
    if how == "waited for":
        work.wait()
    del work
    goes_on = asynchronous or how == "dropped"
    assert under_way(control) == ["all_reduce"] * goes_on
    inner.work.done.set()
    wait_for_value(lambda: under_way(control), [])
    assert len(read(Recorded(None, control), False).records) == 1


def test_what_is_coalesced_ends_with_the_coalescing(comms: Communicators, control: ControlBlock) -> None:
    group, inner = comms.create((0, 1), "nccl", timedelta(seconds=9), dist.HashStore(), None), Nccl()
    group.inner = inner
    device = torch.device("cuda")
    comms.startup.recording = False
    group._start_coalescing(device)
    for _ in range(2):
        group.send([torch.zeros(1)], 1, 0)
    work = group._end_coalescing(device)
    assert under_way(control) == ["send", "send"]
    inner.work.done.set()
    work.wait()
    wait_for_value(lambda: under_way(control), [])
    group._start_coalescing(device)
    group.send([torch.zeros(1)], 1, 0)
    assert under_way(control) == [] and inner.depth == 0  # nothing is begun before the end
    comms.abort(2)
    with pytest.raises(EpochChanged):
        group._end_coalescing(device)
    comms.reset()
    assert under_way(control) == [] and not group.coalesced


@pytest.mark.parametrize("error", [EpochChanged("over"), ValueError("a shape")])
def test_coalescing_ends_whatever_is_raised_in_it(
    comms: Communicators, control: ControlBlock, error: Exception
) -> None:
    """NCCL's group is the thread's own: while it is open nothing is launched, in no group."""
    group, inner = comms.create((0, 1), "nccl", timedelta(seconds=9), dist.HashStore(), None), Nccl()
    group.inner, inner.fails_with = inner, error
    comms.startup.recording = False
    with pytest.raises(type(error)), group.together(torch.device("cuda")):
        group.send([torch.zeros(1)], 1, 0)
    assert inner.depth == 0 and under_way(control) == [] and comms._in_flight == 0
    with pytest.raises(KeyError), group.together(torch.device("cuda")):
        raise KeyError
    assert group.coalesced is None


def test_results_that_were_waited_for_are_not_kept(comms: Communicators) -> None:
    """Those of all gathers of a step, which the device has yet to come to, would be gigabytes."""
    inner = Nccl()
    result = torch.zeros(1)
    inner.work.result = result  # type: ignore[attr-defined]
    gone = weakref.finalize(result, lambda: None)
    work = launched(comms, inner)
    assert work is not None and work.wait()
    inner.work = Work()
    del work, result
    gc.collect()
    assert not gone.alive


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_of_a_link_is_told_of(comms: Communicators, lost: bool) -> None:
    """The operation does not end, or counts as completed; only the backend says that the link has failed."""
    reasons: list[tuple[str, bool]] = []
    suspected = threading.Event()
    comms.hung = lambda reason, by_link: reasons.append((reason, by_link))
    comms._on_failure = lambda *_: suspected.set()
    comms._grace = 60.0 if lost else 0.1
    inner = Nccl()
    work = launched(comms, inner)
    assert work is not None and work.wait()
    inner.error_of_link = "nccl reports COMM_ERROR"
    assert suspected.wait(60)
    if lost:
        comms.abort(2)
        wait_for_value(lambda: [t.name for t in threading.enumerate() if t.name == "ft-link"], [])
        assert reasons == []
    else:
        said = "allreduce in group 0-1:1#0 of epoch 1 cannot end: nccl reports COMM_ERROR"
        wait_for_value(lambda: reasons, [(said, True)])


@pytest.mark.parametrize("where", ["the first operation", "a barrier", "a wait with a limit"])
def test_an_error_of_a_link_is_told_of_while_torch_itself_waits(comms: Communicators, where: str) -> None:
    suspected, goes_on = threading.Event(), threading.Event()
    comms._on_failure = lambda *_: suspected.set()
    inner = Nccl()
    inner.connected = where != "the first operation"

    def blocked(*_: Any) -> Any:
        inner.error_of_link = "nccl reports COMM_ERROR"
        assert goes_on.wait(60)
        return inner.work

    if where == "a wait with a limit":
        inner.work.wait = blocked  # type: ignore[method-assign]
    else:
        inner.allreduce = inner.barrier = blocked  # type: ignore[method-assign,attr-defined]
    kind = "barrier" if where == "a barrier" else "allreduce"

    def acts() -> None:
        work = comms.launch(inner, [Call(kind, kind, ([],), {})], ())
        assert work is not None and work.wait(timedelta(seconds=50))

    thread = threading.Thread(target=acts)
    thread.start()
    assert suspected.wait(60) and thread.is_alive()
    goes_on.set()
    thread.join()


def test_what_is_under_way_at_an_abort_counts_no_longer(comms: Communicators) -> None:
    words: list[int] = []
    comms.traffic = words.append
    inner = Nccl()
    work = launched(comms, inner)
    assert work is not None
    comms.abort(2)
    with pytest.raises(EpochChanged):  # the backend says that all is well
        work.wait()
    comms.reset()
    assert words == [1, 0]
    launched(comms, Nccl(2))
    inner.work.done.set()  # late
    assert words == [1, 0, 1]


@pytest.mark.parametrize("lost", [True, False])
def test_an_operation_that_takes_too_long_is_told_of(comms: Communicators, lost: bool) -> None:
    """Unless an epoch ends it."""
    reasons: list[tuple[str, bool]] = []
    suspected = threading.Event()
    comms.hung = lambda reason, by_link: reasons.append((reason, by_link))
    comms._on_failure = lambda *_: suspected.set()
    comms._grace = 60.0 if lost else 0.1
    work = launched(comms, Nccl(timeout=0.01))
    assert work is not None and work.wait()
    assert suspected.wait(60)
    if lost:
        comms.abort(2)
        wait_for_value(lambda: [t.name for t in threading.enumerate() if t.name == "ft-timeout"], [])
        assert reasons == []
    else:
        about = (
            "allreduce in group 0-1:1#0 of epoch 1 has not ended within the group's time-out of 0:00:00.01"
        )
        wait_for_value(lambda: [(r.startswith(about), by_link) for r, by_link in reasons], [(True, False)])

"""What the engine does about NCCL, as far as that can be seen without a device."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from ft_core.comm import nccl_environment
from ft_core.comm.inner import Inner, start
from ft_core.comm.process_group import Communicators
from ft_core.process import stream
from ft_core.protocol.groups import GroupId, Series
from ft_core.worker import device_memory

ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DUMP, PATIENCE = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
MULTICAST = "NCCL_NVLS_ENABLE"
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
OFF = {name: "0" for name in (ERRORS, "TORCH_NCCL_ENABLE_MONITORING", DUMP, PATIENCE, RETHROW, MULTICAST)}


@pytest.mark.parametrize(
    ("said", "workers"),
    [
        ({}, OFF),
        ({ERRORS: "1"}, OFF | {ERRORS: "1"}),
        ({"NCCL_ASYNC_ERROR_HANDLING": "3"}, OFF | {ERRORS: "3"}),  # torch would prefer the new name
        ({DUMP: "0"}, OFF),
        ({DUMP: "1"}, {name: value for name, value in OFF.items() if name != PATIENCE} | {DUMP: "1"}),
        ({DUMP: "1", PATIENCE: "500"}, OFF | {DUMP: "1", PATIENCE: "500"}),
        ({MULTICAST: "1"}, OFF | {MULTICAST: "1"}),
        ({"PATH": "/bin"}, OFF),
    ],
)
def test_what_somebody_has_said_stays(said: dict[str, str], workers: dict[str, str]) -> None:
    assert nccl_environment.completed(said) == workers


class Backend:
    """NCCL's and gloo's, as far as an abort goes."""

    def __init__(self, log: list[str], error: RuntimeError | None = None) -> None:
        self._log, self._error = log, error

    def abort(self) -> None:
        self._log.append("nccl aborted")
        if self._error is not None:
            raise self._error

    def recv(self, tensors: Any, peer: int, tag: int) -> Backend:
        self._log.append(f"receive from {peer}")
        return self

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("Timed out waiting")


def opened(log: list[str], error: RuntimeError | None = None) -> Inner:
    devices = {"cpu": "gloo", "cuda": "nccl"}
    inner = Inner(GroupId.of((0, 1), 0), (0, 1), 0, devices, timedelta(seconds=9), None, 4, 0)
    inner._backends = {"nccl": Backend(log, error), "gloo": Backend(log)}
    return inner


def test_an_abort_that_hangs_holds_up_nobody_who_waits_for_gloo() -> None:
    log: list[str] = []
    opened(log).wake()
    assert log == ["receive from 1", "nccl aborted"]


def test_an_abort_waits_for_what_is_just_being_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would free what NCCL has in its group. But not for long: that may wait for what only it ends."""
    log: list[str] = []
    inner = opened(log)
    with inner.beginning:
        wake = start("wake", inner.wake)
        wake.join(0.1)
        assert log == ["receive from 1"]
    wake.join()
    assert log == ["receive from 1", "nccl aborted"]
    monkeypatch.setattr("ft_core.comm.inner._BEGINS", 0.01)
    with inner.beginning:
        inner.wake()
    assert log[-1] == "nccl aborted" and len(log) == 4 and inner.beginning.acquire(blocking=False)


def test_a_time_out_of_torchs_own_is_no_error_of_a_link() -> None:
    """It counts from where an operation is issued, though its peers may have something else to do first."""
    inner = opened([])
    kinds = torch._C._distributed_c10d.ErrorType
    inner._backends["nccl"].get_error = lambda: kinds.TIMEOUT
    assert not inner.link_error()
    inner._backends["nccl"].get_error = lambda: kinds.REMOTE_ERROR
    assert inner.link_error() == "nccl reports REMOTE_ERROR"


def test_an_abort_that_fails_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    opened([], RuntimeError("Future for ProcessGroup abort timed out after 9000 ms")).wake()
    assert "group 0-1:1#0 of epoch 4 could not be aborted" in caplog.text
    assert "timed out after 9000 ms" in caplog.text


class Group:
    """torch's group: holds its backends, and its end keeps Python's lock."""

    def __init__(self, backends: list[Any], log: list[str]) -> None:
        self._backends, self._log = backends, log

    def __del__(self) -> None:
        self._log.append("group")


class Held:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __del__(self) -> None:
        self._log.append("backend")


def test_the_end_of_a_group_is_not_that_of_its_backends() -> None:
    log: list[str] = []
    inner = opened([])
    inner._backends = {"nccl": Held(log)}
    inner.pg = Group(list(inner._backends.values()), log)
    inner.close()
    assert log == ["group", "backend"]


# -- memory of ended workers ---------------------------------------------------------------------------

GONE = 2**22 + 1
"""A pid above the largest that Linux gives."""


def readings(values: list[Any]) -> Callable[[], Any]:
    """One after the other; the last one stays."""
    rest: Iterator[Any] = iter(values)
    last = values[-1]
    return lambda: next(rest, last)


@pytest.mark.parametrize(
    ("free", "pids", "looks"),
    [
        ([5], [None], 2),  # nobody knows who holds memory, and none comes back
        ([5], [{os.getpid()}], 2),
        ([5, 5, 5, 70, 70], [{os.getpid(), GONE}] * 3 + [{os.getpid()}], 5),
        ([5, 20, 70, 70], [None], 4),
    ],
)
def test_what_ended_workers_hold_is_waited_for(free: list[int], pids: list[Any], looks: int) -> None:
    seen: list[int] = []
    read = readings(free)

    def looked() -> int:
        seen.append(read())
        return seen[-1]

    assert device_memory.given_back(3, 0, looked, readings(pids))
    assert len(seen) == looks and seen[-1] == free[-1]


def test_what_does_not_come_back_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    pids = readings([{os.getpid(), GONE}])
    assert not device_memory.given_back(3, 1, lambda: 7 << 20, pids, limit=0.1)
    assert f"GPU 1 is not free of its former workers, processes [{GONE}] hold memory" in caplog.text
    assert "role 3" in caplog.text and "7 MB are free" in caplog.text


def test_a_process_without_nvml_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_memory.holders(0) is None


# -- events --------------------------------------------------------------------------------------------


class Cuda:
    """CUDA's library, as far as events go. `ready`: what a query says."""

    def __init__(self, ready: int = 0, refuses: str = "") -> None:
        self.ready, self.refuses, self.calls = ready, refuses, list[str]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 700 if name == self.refuses else self.ready if name == "cudaEventQuery" else 0

        return call


def test_events_are_recorded_and_given_back() -> None:
    cuda = Cuda(ready=600)
    event = stream._Event(cuda, 7)
    assert not event.query()
    cuda.ready = 0
    assert event.query()
    event.synchronize()
    del event
    made = ["cudaEventCreateWithFlags", "cudaEventRecord"]
    assert cuda.calls == [
        *made,
        "cudaEventQuery",
        "cudaEventQuery",
        "cudaEventSynchronize",
        "cudaEventDestroy",
    ]


@pytest.mark.parametrize("call", ["cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize"])
def test_a_failed_device_is_told_of_by_its_events(call: str) -> None:
    cuda = Cuda(refuses=call)

    def use() -> None:
        event = stream._Event(cuda, 7)
        event.query()
        event.synchronize()

    with pytest.raises(RuntimeError, match="CUDA error 700"):
        use()
    gc.collect()
    assert cuda.calls[-1] == "cudaEventDestroy"


# -- aborts --------------------------------------------------------------------------------------------


def test_what_is_opened_waits_for_aborts(caplog: pytest.LogCaptureFixture) -> None:
    """Their memory may be all that there is."""
    comms = Communicators(0, 2, lambda reason: None, b"s")
    comms.startup.recording = False
    group = comms.create((0, 1), "nccl", timedelta(seconds=9), dist.HashStore(), None)
    log, aborted = list[str](), threading.Event()
    old = opened(log)
    old.wake = aborted.wait  # type: ignore[method-assign,assignment]
    old.ready, old.epoch, group.inner, comms.epoch = True, 1, old, 1
    comms.abort(2)
    opener = SimpleNamespace(open=lambda inner, urgent, met: log.append("opened"))
    new = opened(log)
    opening = start("open", comms._open, new, opener, False)
    opening.join(0.3)
    assert log == []
    aborted.set()
    opening.join(60)
    assert log == ["opened"] and not caplog.records


def test_what_is_opened_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch says of an abort that takes too long nothing that anybody would hear."""
    monkeypatch.setattr("ft_core.comm.process_group.ABORTS", 0.1)
    comms, log, aborted = Communicators(0, 2, lambda reason: None, b"s"), list[str](), threading.Event()
    comms._aborts = [start("wake", aborted.wait)]
    opener = SimpleNamespace(open=lambda inner, urgent, met: log.append("opened"))
    comms._open(opened(log), opener, False)  # type: ignore[arg-type]
    assert log == ["opened"] and "former epochs could not be aborted within 0.1 s" in caplog.text
    aborted.set()


# -- devices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "used", "expected"), [(5, None, 5), (None, 3, 3), (None, None, 2)])
def test_who_is_asked_knows_its_device(
    monkeypatch: pytest.MonkeyPatch, bound: int | None, used: int | None, expected: int
) -> None:
    """Bound by the script, else used by it, else the one of its local rank: never none, which hangs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "2")
    comms = Communicators(0, 2, lambda reason: None, b"s")
    comms.epoch = 1
    made = lambda device: comms.create(  # noqa: E731
        (0, 1), "nccl", timedelta(seconds=9), dist.HashStore(), None, device
    )
    if used is not None:
        made(used)  # another group
    group = made(bound)
    monkeypatch.setattr(comms, "_open", lambda *_: None)
    comms._on_asked(Series(group.identity))
    assert group.inner is not None and group.inner._device == expected

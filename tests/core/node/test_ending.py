"""A worker's end is noticed when it begins to end, and what it still has then is left to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core.node import dying_workers
from core.node.dying_workers import ALONE
from waiting import wait_for_value

from ft_core.node.workers import processes as workers
from ft_core.node.workers.processes import WorkerPool
from ft_core.process import ending
from ft_core.protocol import acceptor
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.connection import Connection
from ft_core.protocol.sockets import listen
from ft_core.settings import Command
from ft_core.worker import predecessor_cleanup

SECRET = b"secret"


class Tee:
    """No output is of interest."""

    def follow(self, directory: Path) -> None: ...

    def unfollow(self, directory: Path) -> None: ...


async def end(tmp_path: Path, kind: str, kill: bool) -> list[Any]:
    """What the agent's pool tells of a worker: ("ended", code, whether its process was there), "gone"."""
    told: list[Any] = []
    ready, over = asyncio.Event(), asyncio.Event()

    def ended(number: int, pid: int, code: int, version: int) -> None:
        told.append(("ended", code, ending.status(pid) is not None))

    def gone(number: int) -> None:
        told.append("gone")
        over.set()

    address = f"unix:\0ft-test-{uuid.uuid4().hex}"
    pool = WorkerPool(
        socket=address,
        secret=SECRET,
        job_dir=tmp_path,
        log_dir=tmp_path,
        command=Command(kind),
        redirects=0,
        json=False,
        ended=ended,
        gone=gone,
    )

    async def accept(connection: Connection) -> None:
        channel = await AsyncChannel.accept(connection, SECRET, m.FROM_WORKER)
        hello = await channel.recv()
        assert isinstance(hello, m.WorkerHello) and pool.connect(hello.worker, channel)
        with contextlib.suppress(ConnectionError):
            while True:
                await channel.recv()
                pool.heard(hello.worker)
                ready.set()

    serving = asyncio.create_task(acceptor.serve(listen(address), SECRET, "test", accept))
    pool.open(Tee())  # type: ignore[arg-type]
    pid = pool.start(0, -1)
    await ready.wait()
    if kill:
        os.kill(pid, signal.SIGKILL)
    await over.wait()
    serving.cancel()
    return told


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "entry", dying_workers)


def test_a_worker_with_much_memory_is_lost_before_its_memory_is_freed(tmp_path: Path, stubs: None) -> None:
    """A machine that stands still for as long as that takes hides it, but not again and again."""
    for _ in range(10):
        (name, code, there), last = asyncio.run(end(tmp_path, str(2 << 30), kill=True))
        assert (name, code, last) == ("ended", -signal.SIGKILL, "gone")
        if there:
            return
    pytest.fail("it was gone each time when its end was noticed")


def test_a_main_thread_that_ends_alone_ends_its_worker(tmp_path: Path, stubs: None) -> None:
    assert asyncio.run(end(tmp_path, ALONE, kill=False)) == [("ended", 1, True), "gone"]


def test_where_the_kernel_does_not_tell_its_end_is_noticed_when_it_is_gone(
    tmp_path: Path, stubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending.Lock, "holder_ends", lambda self, wanted: False)
    told = asyncio.run(end(tmp_path, "4096", kill=True))
    assert told == [("ended", -signal.SIGKILL, False), "gone"]


# -- what a successor waits for ----------------------------------------------------------------------------

LISTENS = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if sys.argv[2] == "datagrams" else socket.SOCK_STREAM)
sock.bind(("127.0.0.1", int(sys.argv[1])))
sock.type == socket.SOCK_STREAM and sock.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(port: int, how: str) -> Iterator[int]:
    command = [sys.executable, "-c", LISTENS, str(port), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


def chosen_port(kind: int) -> int:
    """A free port that the kernel would not choose."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in range(first - 1, 1024, -1):
        with socket.socket(socket.AF_INET, kind) as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    pytest.skip("the kernel chooses among all ports here")


@pytest.mark.parametrize(
    ("how", "kind"), [("connections", socket.SOCK_STREAM), ("datagrams", socket.SOCK_DGRAM)]
)
def test_a_port_that_a_script_has_chosen_is_seen(how: str, kind: int) -> None:
    with listening(chosen_port(kind), how) as pid:
        assert predecessor_cleanup.has_chosen_port(pid)
    with listening(0, how) as pid:
        assert not predecessor_cleanup.has_chosen_port(pid), "nobody asks the kernel for the same one again"
    assert predecessor_cleanup.has_chosen_port(pid), "of one whose files cannot be seen that is not known"


def test_what_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    left = {7: 3}
    """How often a process is still seen to be ending."""

    def status(pid: int) -> int | None:
        left[pid] = left.get(pid, 0) - 1
        return 9 if left[pid] >= 0 else None

    monkeypatch.setattr(ending, "status", status)
    assert predecessor_cleanup.wait(0, [7], to_the_end=False, holds_port=lambda pid: False) and left[7] == 2
    assert (
        predecessor_cleanup.wait(0, [7, 8], to_the_end=True, holds_port=lambda pid: False) and left[7] == -1
    )
    left[7] = 3
    assert predecessor_cleanup.wait(0, [7], to_the_end=False, holds_port=lambda pid: True) and left[7] == -1
    left[7] = sys.maxsize
    assert not predecessor_cleanup.wait(0, [7], to_the_end=True, limit=0.0)
    assert "has not ended process 7" in caplog.text


def test_a_process_that_runs_is_not_ending() -> None:
    assert ending.status(os.getpid()) is None
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    wait_for_value(lambda: ending.status(child.pid), 3 << 8)  # it is a zombie
    child.wait()
    assert ending.status(child.pid) is None


def test_a_lock_that_nobody_holds_tells_nothing() -> None:
    lock = ending.Lock(memoryview(bytearray(ending.Lock.BYTES)))
    lock.create()
    assert not lock.holder_ends(lambda: True)
    assert not lock.holder_ends(lambda: False)


def test_who_waits_for_a_lock_looks_whether_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_LOOK", 0.0)
    lock, looks = ending.Lock(memoryview(bytearray(ending.Lock.BYTES))), iter([True, True, False])
    lock.create()
    lock.hold()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(lock.holder_ends(lambda: next(looks))))
    thread.start()
    thread.join(60)
    assert found == [False]


def test_memory_of_a_lock_that_is_held_stays() -> None:
    """A thread's locks are linked: the next one would write to what came to the place of this one."""
    code = (
        "import gc; from ft_core.state.memory import ControlBlock\n"
        "for _ in range(3): ControlBlock.create().life.hold(); gc.collect()\n"
        "print(open('/proc/self/maps').read().count('ft-control'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"

"""Memory for roles that may come is there before they do, and not where others need it."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from core.fleet import Fleet, play
from core.plans import plan
from core.real_agent import RealAgent

from ft_core.net.transport import TcpTransport
from ft_core.node.link.inquiries import Inquiries
from ft_core.node.memory import ready_memory
from ft_core.node.memory.fetch import bring
from ft_core.node.memory.ready_memory import ReadyMemory
from ft_core.node.workers.processes import use_huge_pages
from ft_core.process.host_memory import HostMemory, room
from ft_core.protocol import messages as m
from ft_core.settings import Command, Settings
from ft_core.state import memory as memory_module
from ft_core.state.manifest import CHUNK, Segment, layout
from ft_core.state.memory import SharedMemory, SnapshotBuffer, touch
from ft_core.state.store import NodeStore

SECRET = b"s" * 32
SIZE = 5 * CHUNK + 100
SEGMENT = layout((0,), [("w", "uint8", (SIZE,), SIZE)])
BUFFER = SnapshotBuffer.size([SEGMENT])
PLENTY = HostMemory(90 << 30, 100 << 30)


def pages(memory: SharedMemory) -> int:
    """Bytes that the kernel has given for it."""
    return os.fstat(memory._fd).st_blocks * 512


def fill(store: NodeStore, segment: Segment = SEGMENT, version: int = 3) -> bytes:
    """Have a snapshot of role 0 there."""
    buffer = store.memory(0).allocate(0, [segment])
    data = os.urandom(segment.nbytes)
    buffer.data(0)[:] = data
    for chunk in range(segment.chunks):
        part = data[chunk * CHUNK : (chunk + 1) * CHUNK]
        buffer.checksums(0)[chunk] = xxhash.xxh3_64_intdigest(part)
    buffer.version = version
    return data


@dataclass
class Two:
    """A node that plays role 0, and a spare."""

    peer: NodeStore
    store: NodeStore
    transport: TcpTransport
    ready: ReadyMemory
    plan: m.NodePlan
    room: HostMemory = PLENTY
    """That the spare's machine has."""

    def look(self) -> None:
        self.ready.look(self.plan)


@contextmanager
def two(places: int = 1) -> Iterator[Two]:
    peer, store = NodeStore(), NodeStore()
    other = TcpTransport(peer, SECRET, answer=Inquiries("node0", peer, lambda: 0.0).answer)
    transport = TcpTransport(store, SECRET)
    try:
        nodes = {"node0": m.NodeAddress(other.address, "a"), "node1": m.NodeAddress(transport.address, "b")}
        of = plan(roles={0: "node0"}, nodes=nodes)
        found = Two(peer, store, transport, ReadyMemory(store, transport, places, lambda: found.room), of)
        found.ready.use("node1", of)
        yield found
    finally:
        transport.close()
        other.close()


def test_a_spare_has_two_buffers_for_each_place_of_the_size_that_others_have():
    with two(places=3) as t:
        t.look()
        assert t.ready.nbytes == 0  # nobody has any state yet
        fill(t.peer)
        t.look()
        assert t.ready.nbytes == 6 * BUFFER
        t.look()
        assert t.ready.nbytes == 6 * BUFFER


def test_what_is_ready_is_what_a_fetch_and_the_next_snapshot_go_to():
    with two() as t:
        data = fill(t.peer)
        t.look()
        inodes = {os.fstat(b.memory._fd).st_ino for b in t.ready._buffers}
        plays = plan(
            2, roles={0: "node1"}, nodes=t.plan.nodes, version=3, sources={0: {SEGMENT.id: ["node0"]}}
        )
        t.ready.use("node1", plays)
        settings = Settings(nnodes=1, nproc_per_node=1, command=Command("train.py"))
        buffer = bring(0, plays, t.store, t.transport, settings)
        slot = t.store.memory(0).take(buffer)
        assert bytes(buffer.data(0)) == data
        t.ready.look(plays)
        assert t.ready.nbytes == BUFFER  # for the role's other snapshot
        other = t.store.memory(0).allocate(1 - slot, [SEGMENT])
        assert {os.fstat(b.memory._fd).st_ino for b in (buffer, other)} == inodes
        assert pages(other.memory) >= BUFFER
        assert t.ready.nbytes == 0
        t.ready.look(plays)
        assert t.ready.nbytes == 0  # all places are taken


def test_who_plays_all_its_roles_makes_nothing_ready():
    with two() as t:
        fill(t.store)
        of = plan(roles={0: "node1"}, nodes=t.plan.nodes)
        t.ready.use("node1", of)
        t.ready.look(of)
        assert t.ready.nbytes == 0


def test_a_quarter_of_the_memory_stays_free():
    with two() as t:
        fill(t.peer)
        t.room = HostMemory((25 << 30) + BUFFER - 1, 100 << 30)
        t.look()
        assert t.ready.nbytes == 0
        t.room = HostMemory((25 << 30) + BUFFER, 100 << 30)
        t.look()
        assert t.ready.nbytes == 2 * BUFFER


def test_memory_is_given_back_to_a_host_that_is_short_of_it():
    with two() as t:
        fill(t.peer)
        t.look()
        descriptors = [b.memory._fd for b in t.ready._buffers]
        t.room = HostMemory(12 << 30, 100 << 30)
        t.look()
        assert t.ready.nbytes == 0
        for fd in descriptors:  # those that are there now have no pages
            assert os.fstat(fd).st_blocks == 0
        t.room = PLENTY
        t.look()
        assert t.ready.nbytes == 2 * BUFFER


def test_what_is_ready_grows_with_the_state(monkeypatch: pytest.MonkeyPatch):
    """With the optimizer's first step, for example."""
    monkeypatch.setattr(ready_memory, "_ASK_AGAIN", 1)
    with two() as t:
        fill(t.peer)
        t.look()
        before = {os.fstat(b.memory._fd).st_ino for b in t.ready._buffers}
        larger = layout((0,), [("w", "uint8", (3 * SIZE,), 3 * SIZE)])
        fill(t.peer, larger)
        t.look()
        assert t.ready.nbytes == 2 * SnapshotBuffer.size([larger])
        assert {os.fstat(b.memory._fd).st_ino for b in t.ready._buffers} == before
        assert [pages(b.memory) for b in t.ready._buffers] == [SnapshotBuffer.size([larger])] * 2
        smaller = layout((0,), [("w", "uint8", (SIZE // 4,), SIZE // 4)])
        fill(t.peer, smaller)
        t.peer.memory(0).slots[1] = None
        t.look()
        assert t.ready.nbytes == 2 * SnapshotBuffer.size([smaller])  # others have better use for the rest


def test_a_larger_role_gets_what_there_is_and_more():
    with two() as t:
        fill(t.peer)
        t.look()
        before = {os.fstat(b.memory._fd).st_ino for b in t.ready._buffers}
        memory = t.ready.take(3 * BUFFER)
        assert os.fstat(memory._fd).st_ino in before
        assert (memory.nbytes, len(memory.view)) == (-(-3 * BUFFER // mmap.PAGESIZE) * mmap.PAGESIZE,) * 2
        assert pages(memory) >= BUFFER
        assert not any(memory.view)
        assert SharedMemory.open(memory.address).nbytes == memory.nbytes


def test_a_much_smaller_role_leaves_it_to_others():
    with two() as t:
        fill(t.peer)
        t.look()
        assert t.ready.take(BUFFER // 2).nbytes < BUFFER
        assert t.ready.nbytes == 2 * BUFFER


def test_memory_that_is_taken_is_touched_no_more(monkeypatch: pytest.MonkeyPatch):
    """Its new owner writes to it at once."""
    touched: list[int] = []

    def first_piece(memory: SharedMemory, start: int, nbytes: int) -> None:
        touched.append(start)
        touch(memory, start, nbytes)
        thread = threading.Thread(target=lambda: taken.append(t.ready.take(BUFFER)))
        if len(touched) == 1:
            thread.start()
            threads.append(thread)

    taken: list[SharedMemory] = []
    threads: list[threading.Thread] = []
    monkeypatch.setattr(ready_memory, "touch", first_piece)
    monkeypatch.setattr(ready_memory, "_PIECE", CHUNK)
    with two() as t:
        fill(t.peer)
        t.look()
        threads[0].join()
        held = pages(taken[0])
        t.look()
        assert pages(taken[0]) == held
        assert t.ready.nbytes == 2 * BUFFER


def test_nothing_is_touched_in_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    where: set[str] = set()

    def touched(memory: SharedMemory, start: int, nbytes: int) -> None:
        where.add(threading.current_thread().name)
        touch(memory, start, nbytes)

    async def test(t: Two) -> None:
        serving = asyncio.create_task(t.ready.serve())
        while t.ready.nbytes < 2 * BUFFER:
            await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    monkeypatch.setattr(ready_memory, "touch", touched)
    monkeypatch.setattr(ready_memory, "_SETTLES", 0.01)
    with two() as t:
        fill(t.peer)
        asyncio.run(test(t))
    assert where
    assert threading.main_thread().name not in where


def test_an_old_kernel_gives_pages_as_they_are_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_module, "_POPULATE_WRITE", 9999)
    memory = SharedMemory.create("test", 8 << 20)
    touch(memory, 4 << 20, 4 << 20)
    assert pages(memory) == 4 << 20


def test_what_the_kernel_refuses_is_said():
    memory = SharedMemory.create("test", 8 << 20)
    with pytest.raises(OSError) as refused:
        touch(memory, 1 << 60, 4096)
    assert refused.value.errno == errno.ENOMEM


def test_a_cgroups_limit_counts(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    assert room(tmp_path) == HostMemory(900 << 10, 1000 << 10)
    (tmp_path / "sys/fs/cgroup/a").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text(f"{500 << 10}\n")
    (tmp_path / "sys/fs/cgroup/a/memory.current").write_text(f"{100 << 10}\n")
    assert room(tmp_path) == HostMemory(400 << 10, 500 << 10)


def test_a_spare_takes_roles_over_into_memory_that_was_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ready_memory, "_SETTLES", 0.01)

    async def test(fleet: Fleet) -> None:
        node, spare = (RealAgent(fleet.settings, fleet.job_dir, f"agent{rank}", rank) for rank in (0, -1))
        node.serve()
        spare.serve()
        await fleet.event("resumed")
        await fleet.until(lambda: "agent-1" in node.nodes)
        node.step()
        await fleet.until(lambda: spare.ready.nbytes >= 4 * mmap.PAGESIZE and node.committed() == [2, 2])
        before = {os.fstat(b.memory._fd).st_ino for b in spare.ready._buffers}
        await node.end()
        await fleet.event("resumed", 2)
        slots = [buffer for role in (0, 1) for buffer in spare.store.memory(role).slots]
        held = {os.fstat(buffer.memory._fd).st_ino for buffer in slots if buffer is not None}
        assert len(held) >= 2 and held <= before
        assert node.ready.nbytes == 0  # all its places were taken
        await spare.end()

    play(test, tmp_path / "job", nodes=1, nproc=2, spares=1, ranks=[], replicas=1)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.check=1", "THP_MEM_ALLOC_ENABLE": "0"},
            {
                "GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1",
                "THP_MEM_ALLOC_ENABLE": "0",
            },
        ),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
            {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
        ),
    ],
)
def test_workers_take_memory_in_huge_pages_unless_told_otherwise(given: dict[str, str], used: dict[str, str]):
    use_huge_pages(given)
    assert given == used

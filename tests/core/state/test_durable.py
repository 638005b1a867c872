"""The durable tier's files: what is torn or damaged is noticed, and hides no older checkpoint."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from core import plans
from core.fleet import Fleet
from full_disk import file_limit

from ft_core.adapter import StateTensor
from ft_core.control.decide import durable_names
from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.node import events as e
from ft_core.node.link.pulse import Loop
from ft_core.node.shell import NodeShell
from ft_core.protocol import messages as m
from ft_core.protocol.checkpoint_names import parse
from ft_core.protocol.messages import DurableFailed, DurableWritten, ListDurable
from ft_core.settings import Command, Settings, write_secret
from ft_core.state import durable
from ft_core.state.snapshot import Snapshotter
from ft_core.state.store import NodeStore, RoleMemory


class Model:
    def __init__(self, numbers: int = 1000) -> None:
        self.weight = torch.arange(numbers, dtype=torch.float32)

    def tensors(self) -> Iterator[StateTensor]:
        yield StateTensor("weight", self.weight, (0,))

    def envelope(self) -> dict[str, int]:
        return {"step": 1}

    def envelope_holders(self) -> tuple[int]:
        return (0,)


@pytest.fixture
def store() -> NodeStore:
    """With version 1 of role 0."""
    return holding(Model())


def holding(model: Model) -> NodeStore:
    store = NodeStore()
    memory = store.memory(0)
    snapshotter = Snapshotter(
        model,  # type: ignore[arg-type]
        lambda slot, segments: memory.allocate(slot, segments).memory.address,
        lambda version: None,
    )
    snapshotter.stage(1)
    snapshotter.wait()
    return store


def plan(
    epoch: int = 1, job: str = "aa", world: int = 1, away: dict[int, list[str]] | None = None, **more: Any
) -> m.NodePlan:
    roles = {role: "node0" for role in range(world)}
    return plans.plan(epoch, job=job, roles=roles, away=away or {}, **more)


def write(directory: Path, version: int, store: NodeStore, epoch: int = 1, job: str = "aa") -> Path:
    """The snapshot as if it were of that version."""
    _, buffer = store.memory(0).find(1) or pytest.fail("there is no snapshot")
    buffer.version = version
    try:
        assert durable.save(str(directory), 1, store, 0, version, plan(epoch, job), replicated=False) == [0]
    finally:
        buffer.version = 1
    return directory / durable.name_of(version, plan(epoch, job))


def read(path: Path) -> list[bytes]:
    segments, fill = durable.open_role(str(path.parent), path.name, 0)
    buffer = RoleMemory().allocate(0, segments)
    fill(buffer)
    return [bytes(buffer.data(i)) for i in range(len(segments))]


def versions(directory: Path) -> list[int]:
    return [durable.version_of(name) for name in durable.complete(str(directory), 1)]


def truncate(path: Path) -> None:
    path.write_bytes((data := path.read_bytes())[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(8.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)


def rename_item(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"weight"', b'"wejght"', 1))


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def test_what_was_written_is_read(tmp_path: Path, store: NodeStore):
    _, snapshot = store.memory(0).find(1) or pytest.fail("there is no snapshot")
    expected = [bytes(snapshot.data(i)) for i in range(len(snapshot.segments))]
    assert read(write(tmp_path, 5, store)) == expected


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, "segments/0x1-*"),
        (truncate, "segments/0x1-*"),
        (rename_item, "segments/0x1-*"),
        (extend, "segments/0x1-*"),
        (Path.unlink, "segments/0x1-*"),
        (truncate, "role-0.json"),
    ],
)
def test_a_damaged_one_gives_way_to_an_older_one(damage, what: str, tmp_path: Path, store: NodeStore):
    write(tmp_path, 5, store)
    newest = write(tmp_path, 10, store)
    [path] = newest.glob(what)
    damage(path)
    with pytest.raises(CorruptSnapshot, match=r"step-00000010-00001-aa-1, role 0: .* not used any more"):
        read(newest)
    assert versions(tmp_path) == [5]
    write(tmp_path, 10, store, epoch=2)
    assert versions(tmp_path) == [5, 10]


def test_what_one_node_has_read_wrongly_once_is_read_again(
    tmp_path: Path, store: NodeStore, monkeypatch: pytest.MonkeyPatch
):
    """It is there for all others as well: one bad cable is to cost nobody a checkpoint."""
    base = write(tmp_path, 5, store)
    expected, really, wrong = read(base), durable._read, [True]

    def badly(file: Any, into: memoryview, path: Path) -> None:
        really(file, into, path)
        if wrong:
            wrong.clear()
            into[-1] ^= 1

    monkeypatch.setattr(durable, "_read", badly)
    assert read(base) == expected and not wrong and versions(tmp_path) == [5]


def test_nothing_is_unpickled(tmp_path: Path, store: NodeStore, monkeypatch: pytest.MonkeyPatch):
    """Whoever can write to the storage may change what is trained, but not run code in an agent."""
    path = write(tmp_path, 5, store)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert read(path)


def test_storage_that_does_not_answer_costs_no_checkpoint(tmp_path: Path, store: NodeStore):
    base = write(tmp_path, 5, store)
    [path] = base.glob("segments/0x1-*")
    path.unlink()
    path.mkdir()  # reading it fails with an OSError
    with pytest.raises(TransportError, match="Is a directory"):
        read(base)
    assert versions(tmp_path) == [5]


@pytest.mark.parametrize("others", [(4, "aa"), (3, "bb")], ids=["a later epoch", "another job"])
def test_parts_of_two_pasts_do_not_complete_each_other(others: Any, tmp_path: Path, store: NodeStore):
    """Role 1's part of step 5 is missing in the one, role 0's in the other: nobody can go on from that."""
    directory = str(tmp_path)
    part = durable.parts(store, 0, 1, plan(), replicated=False)[0]
    one, other = durable.name_of(5, plan(3, "aa", world=2)), durable.name_of(5, plan(*others, world=2))
    durable.write_role(directory, one, 0, part)
    durable.write_role(directory, other, 1, part)
    assert durable.complete(directory, 2) == []
    durable.write_role(directory, other, 0, part)
    assert durable.complete(directory, 2) == [other]


def stored(directory: Path) -> dict[str, Any]:
    """Settings of a job with durable checkpoints."""
    return {"durable_dir": str(directory / "durable"), "durable_interval": 5}


def test_all_roles_read_the_newest_that_every_node_sees(tmp_path: Path):
    """The plan names it: nodes may see different lists for a while, and two epochs may have had a step."""
    old, new, last = (durable.name_of(5, plan(epoch)) for epoch in (9_000_009, 10_000_010, 10_000_011))

    async def job() -> None:
        async with Fleet(tmp_path, nodes=2, spares=1, **stored(tmp_path)) as fleet:
            fleet["node0"].durable = [durable.name_of(3, plan()), old, new]
            fleet["node1"].durable = [old, new, last]
            begun = await fleet.event("decided")
            assert (begun["origin"], begun["version"]) == ("durable", 5)
            await fleet.until(lambda: all(fleet[n].plan.durable == new for n in ("node0", "node1")))
            await fleet.event("resumed")
            fleet["node1"].die()
            await fleet.event("resumed", 2)
            assert fleet["node0"].plan.origin == "memory", "and the job's name is kept"
            [job] = {each.job for each in fleet["node0"].plans}
            begun = fleet["node0"].plan
            assert begun is not None and (begun.job, begun.epoch) == (job, 2)
            assert durable.name_of(6, begun) == f"step-00000006-00002-{job}-2"

    asyncio.run(job())


def test_a_checkpoint_that_fails_is_one_event(tmp_path: Path):
    """However many roles had a part in it."""

    async def job() -> None:
        async with Fleet(tmp_path, nodes=2) as fleet:
            await fleet.event("resumed")
            for version in (5, 10):
                for number, reason in enumerate(("No space left on device", "No such file or directory")):
                    about = {"role": number, "version": version, "reason": reason}
                    fleet[f"node{number}"].post(DurableFailed(**about))
                failed = await fleet.event("durable_failed", version // 5)
                assert failed["version"] == version
            for role in (0, 1):
                fleet[f"node{role}"].post(DurableWritten(role=role, epoch=1, version=15, seconds=0.1))
            await fleet.event("durable")
            assert len(fleet.events("durable_failed")) == 2
            assert "node node" in failed["reason"] and failed["roles"]

    asyncio.run(job())


def test_other_threads_go_on_while_a_segment_is_copied():
    """The agent's beats, for one: a thread sees the copy half made, which it could not if it had to wait."""
    size, page = 64 << 20, resource.getpagesize()
    store, seen, ended = holding(Model(size // 4)), set(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.add(int(Path("/proc/self/statm").read_text().split()[1]) * page)

    def copied() -> bool:
        before = int(Path("/proc/self/statm").read_text().split()[1]) * page
        seen.clear()
        [part] = durable.parts(store, 0, 1, plan(), replicated=False).values()
        assert len(part.content[0][1]) > size
        return any(0.2 * size < found - before < 0.8 * size for found in [*seen])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert any(copied() for _ in range(30))
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def agent(tmp_path: Path, store: NodeStore) -> Iterator[NodeShell]:
    """With version 1 of role 0."""
    settings = Settings(
        1, 1, Command("t.py"), controller="127.0.0.1:9", durable_dir=str(tmp_path / "durable")
    )
    secret = write_secret(tmp_path)
    agent = NodeShell(replace(settings, durable_interval=1), secret, tmp_path, "node0", "", 0, Loop())
    agent.store = store
    yield agent
    agent.transport.close()


def test_storage_that_cannot_be_read_is_told(agent: NodeShell, tmp_path: Path):
    heard: list[Any] = []
    agent._handle = heard.append  # type: ignore[method-assign]
    (tmp_path / "durable").symlink_to(tmp_path / "durable")
    asyncio.run(agent._list_durable(7))
    [listed] = heard
    assert (listed.id, listed.names) == (7, ()) and "symbolic links" in listed.error


def test_a_job_does_not_begin_anew_because_storage_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There may be a checkpoint to go on from."""
    monkeypatch.setattr(durable_names, "PATIENCE", 0.5)

    async def job() -> None:
        async with Fleet(tmp_path, nodes=2, **stored(tmp_path)) as fleet:
            fleet["node1"].durable_error = "Input/output error"
            assert await fleet.ended() == 1
            [stopped] = fleet.events("stopped")
            assert stopped["reason"] == (
                f"durable checkpoints in {tmp_path / 'durable'} cannot be read: node1: Input/output error"
            )

    asyncio.run(job())


@pytest.mark.parametrize("readable", [False, True])
def test_nodes_look_for_checkpoints_when_memory_does_not_suffice_and_never_else(
    tmp_path: Path, readable: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(durable_names, "PATIENCE", 0.5)

    def asked() -> set[str]:
        nodes = fleet.nodes.values()
        return {n.name for n in nodes if any(isinstance(each, ListDurable) for each in n.received)}

    async def job() -> None:
        nonlocal fleet
        async with Fleet(tmp_path, nodes=2, spares=5, **stored(tmp_path)) as fleet:
            await fleet.event("resumed")
            begun = fleet["node0"].plan
            assert begun is not None
            name = durable.name_of(5, plan(world=2, job=begun.job))
            for node in fleet.nodes.values():
                node.received.clear()
                node.durable, node.durable_error = [name], "" if readable else "Input/output error"
            fleet["node6"].durable = []  # it has no role
            fleet["node0"].crash(0)
            await fleet.event("resumed", 2)
            fleet["node1"].die()
            await fleet.event("resumed", 3)
            assert asked() == set()
            holders = [n for n in fleet.nodes.values() if n.memory.held or n.memory.kept]
            assert len(holders) < 5
            for node in holders:
                node.die()
            if readable:
                decided = await fleet.event("decided", 4)
                assert (decided["origin"], decided["version"]) == ("durable", 5)
                assert asked() == set(decided["moved"].values())
            else:
                assert await fleet.ended() == 1
                [stopped] = fleet.events("stopped")
                assert "cannot be read: node" in stopped["reason"] and "Input/output" in stopped["reason"]

    fleet: Fleet
    asyncio.run(job())


def test_what_is_written_and_what_is_not_is_told(agent: NodeShell, tmp_path: Path):
    heard: list[Any] = []
    agent._handle = heard.append  # type: ignore[method-assign]
    for version in (1, 2):
        asyncio.run(agent._write_durable(e.WriteDurable(0, version, plan(), replicated=False)))
    assert heard[0] == e.DurableDone(0, 1, 1, (0,))
    assert heard[1].version == 2 and "no longer in memory" in heard[1].failed
    assert versions(tmp_path / "durable") == [1]


@pytest.mark.parametrize("over", [False, True])
def test_what_comes_for_a_save_that_is_over_takes_no_workers_slot(
    over: bool, agent: NodeShell, store: NodeStore, monkeypatch: pytest.MonkeyPatch
):
    """The controller died as the job ended, and the next one had training go on: slots are mapped again."""
    heard: list[Any] = []
    agent._handle = heard.append  # type: ignore[method-assign]
    _, buffer = store.memory(0).find(1) or pytest.fail("there is no snapshot")
    before = [*store.memory(0).slots]
    late = RoleMemory().allocate(0, buffer.segments)
    late.version = 2
    agent.machine.epochs.epoch = 3

    def bring(*_: object) -> object:
        agent.machine.epochs.epoch += over
        return late

    monkeypatch.setattr("ft_core.node.shell.bring", bring)
    about = msgspec.structs.replace(plan(3), version=2, sources={0: {}})
    order = e.WriteVersion((0,), 2, about, replicated=False)
    asyncio.run(agent._write_version(order))
    [written] = heard
    assert written.order == order and (written.failed == "epoch 3 is over") is over
    assert ([*store.memory(0).slots] == before) is over


def test_the_newest_complete_ones_are_kept_and_torn_ones_are_not(tmp_path: Path, store: NodeStore):
    """A torn one has all but one role's part. Others may still be writing the newest two."""
    torn = []
    for version in (10, 20, 30, 40, 50, 60):
        path = write(tmp_path, version, store)
        if version >= 30:
            (path / "role-0.json").rename(path / "role-1.json")
            torn.append(path)
    assert versions(tmp_path) == [10, 20], "no complete one is deleted for torn ones"
    assert sorted(tmp_path.iterdir())[2:] == torn[-3:]
    for version in (70, 80, 90):
        write(tmp_path, version, store, epoch=2)
    assert versions(tmp_path) == [70, 80, 90] and len(list(tmp_path.iterdir())) == 3


def test_what_another_node_deletes_meanwhile_is_not_there(
    tmp_path: Path, store: NodeStore, monkeypatch: pytest.MonkeyPatch
):
    """NFS says so by an error, which ended the job."""
    paths = [write(tmp_path, version, store) for version in (1, 2)]
    listdir, wrong = os.listdir, errno.ESTALE

    def stale(path: Path) -> list[str]:
        if Path(path) == paths[0]:
            raise OSError(wrong, os.strerror(wrong))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", stale)
    assert durable.complete(str(tmp_path), 1) == [paths[1].name]
    wrong = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        durable.complete(str(tmp_path), 1)


def name_of(version: int, epoch: int, job: str) -> str:
    return durable.name_of(version, plan(epoch, job, world=8))


def superfluous(whole: list[str], name: str, **more: Any) -> list[str]:
    """Of complete checkpoints, once that is about to be written. `more`: about the plan."""
    ordered = sorted(whole, key=parse)
    about = plan(parse(name).epoch, parse(name).job, world=8, **more)
    return durable.superfluous(ordered, ordered, name, about.past, failed=False)


def test_the_checkpoints_of_another_job_are_that_jobs():
    """Two share a directory: the one that is ahead deleted the only ones of the other."""
    one, two = [name_of(500, 2, "a"), name_of(1000, 2, "a")], [name_of(v, 5, "b") for v in (500, 1000, 1500)]
    assert superfluous([*one, *two], name_of(2000, 5, "b")) == two[:1]
    assert superfluous([*one, *two], name_of(2000, 5, "b"), begun_from=one[0]) == [one[0], two[0]]


def test_what_was_there_before_a_job_began_gives_way_to_its_own():
    former = [name_of(500, 9, "a"), name_of(1000, 9, "a")]
    begun = {"begun_from": former[1]}
    assert superfluous(former, name_of(1500, 1, "b"), **begun) == []
    assert superfluous([*former, name_of(1500, 1, "b")], name_of(2000, 1, "b"), **begun) == former[:1]


def test_a_job_that_has_gone_back_keeps_what_it_has_written_since():
    """What it had written before is newer by its number, and took the place of all that was of any use."""
    left, kept = [name_of(v, 3, "a") for v in (8500, 9000, 9500)], [name_of(v, 9, "a") for v in (5500, 6000)]
    about = {"left": [(9, 5000)]}
    assert superfluous([*left, kept[0]], name_of(6000, 9, "a"), **about) == left[:1]
    assert superfluous([*left, *kept], name_of(6500, 9, "a"), **about) == left[:1]
    last = name_of(6500, 9, "a")
    assert superfluous([*left, *kept, last], name_of(7000, 9, "a"), **about) == [kept[0], left[0]]


def test_storage_that_only_one_node_sees_is_told(tmp_path: Path, store: NodeStore):
    """Each role's part was written, and no checkpoint would ever be complete. Others may be slow."""
    _, buffer = store.memory(0).find(1) or pytest.fail("there is no snapshot")
    two = plans.plan(1, job="aa", roles={0: "node0", 1: "node1"})

    def save(version: int, ago: float = 0.0) -> None:
        buffer.version = version
        try:
            assert durable.save(str(tmp_path), 2, store, 0, version, two, replicated=False) == [0]
        finally:
            buffer.version = 1
            path = tmp_path / durable.name_of(version, two) / "role-0.json"
            os.utime(path, times=(time.time() - ago,) * 2)

    save(10, ago=100)
    save(20, ago=500)
    for version in (30, 40):
        with pytest.raises(TransportError, match="no storage that all nodes see, and no checkpoint there is"):
            save(version)
    assert len(list(tmp_path.iterdir())) == 3, "what nobody completes does not fill the disk"
    path = tmp_path / durable.name_of(30, two)
    os.utime(path / "role-0.json", times=(time.time() - 500,) * 2)
    durable.write_role(str(tmp_path), path.name, 1, durable.parts(store, 0, 1, plan(), replicated=False)[0])
    save(50)


@pytest.mark.parametrize("last", [3, 10_000_001])  # a controller's eleventh term
def test_one_that_was_written_again_counts_once(tmp_path: Path, store: NodeStore, last: int):
    """A recovery at a checkpoint's step writes that again, in the new epoch."""
    for version, epoch in ((10, 1), (20, 1), (20, 9_000_002 if last > 3 else 2), (20, last), (30, last)):
        write(tmp_path, version, store, epoch)
    assert durable.complete(str(tmp_path), 1) == [
        durable.name_of(version, plan(epoch)) for version, epoch in ((10, 1), (20, last), (30, last))
    ]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, store: NodeStore):
    """Nor do others' parts of it, and what others have left torn: on a full disk nothing else makes room.
    What is complete stays, and what a later epoch is writing."""
    for version in (10, 20, 30):
        write(tmp_path, version, store, epoch=2)
    before = [durable.name_of(version, plan(2)) for version in (20, 30)]
    part = durable.parts(store, 0, 1, plan(), replicated=False)[0]
    for version, about in ((40, plan(1)), (40, plan(2)), (50, plan(1)), (50, plan(7, "bb"))):
        durable.write_role(str(tmp_path), durable.name_of(version, about), 1, part)
    later = durable.name_of(40, plan(3))
    durable.write_role(str(tmp_path), later, 1, part)
    larger = durable.name_of(
        30, plan(world=2)
    )  # a job with more roles left it; nobody here knows what is torn
    durable.write_role(str(tmp_path), larger, 0, part)
    with file_limit(100), pytest.raises(OSError, match="File too large"):
        write(tmp_path, 40, store, epoch=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, later, larger])


def test_what_training_has_overwritten_is_given_up(tmp_path: Path, store: NodeStore):
    with pytest.raises(TransportError, match="step 2 is no longer in memory"):
        durable.save(str(tmp_path), 1, store, 0, 2, plan(), replicated=False)
    assert not list(tmp_path.iterdir())


def test_the_part_of_a_role_that_is_away(store: NodeStore):
    """Its counterpart has all the state but for what is each role's own, or has adopted it."""
    about = plan(absent={1: 0})
    own, theirs = durable.parts(store, 0, 1, about, replicated=True).values()
    assert [segment.holders for segment, *_ in own.content] == [(0,)]
    assert [segment.holders for segment, *_ in theirs.content] == [(1,)]
    assert [row[1:] for row in own.content] == [row[1:] for row in theirs.content]
    about = plan(absent={1: 0}, adopting=True)
    assert list(durable.parts(store, 0, 1, about, replicated=False)) == [0], "nothing was adopted"
    segments = [segment for segment, *_ in theirs.content]
    buffer = store.memory(1, adopted=True).allocate(0, segments)
    buffer.version = 1
    assert list(durable.parts(store, 0, 1, about, replicated=False)) == [0, 1]
    about = plan(absent={1: 0}, adopting=True, away={1: [segments[0].id, "another"]})
    assert list(durable.parts(store, 0, 1, about, replicated=False)) == [0], "there was more"
    assert durable.parts(store, 0, 2, about, replicated=True) == {}

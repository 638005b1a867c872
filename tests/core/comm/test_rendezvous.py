"""The epochs' stores: what torch asks of them, their end, and those who have no business there."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import distributed as dist

from ft_core.comm import inner, rendezvous_server
from ft_core.comm.inner import start
from ft_core.comm.rendezvous import EpochStore
from ft_core.comm.rendezvous_server import Stores
from ft_core.errors import AuthenticationError
from ft_core.protocol.groups import GroupId, Series
from ft_core.protocol.store import MAX_VALUE, Ask, Meet, SetKey, WaitForKeys

SECRET = b"s" * 32
GROUP = GroupId.of(range(2), 0)
COUNT = 5000
LONG, SHORT = timedelta(seconds=60), timedelta(milliseconds=50)


@pytest.fixture
def stores() -> Stores:
    return Stores.in_thread("127.0.0.1", SECRET)


@pytest.fixture
def connect(stores: Stores) -> Iterator[Callable[[int], EpochStore]]:
    made: list[EpochStore] = []

    def one(epoch: int = 1) -> EpochStore:
        made.append(EpochStore(stores.address, SECRET, epoch, len(made)))
        return made[-1]

    yield one
    for store in made:
        store.close()


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a call; what is returned waits for its result, or raises its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = start("call", run)

    def result() -> Any:
        thread.join(LONG.total_seconds())
        assert results, "it still waits"
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    return result


def test_what_torch_asks_of_a_store(connect: Callable[..., EpochStore]) -> None:
    a, b, other = connect(), connect(), connect(2)
    raw = bytes(range(256))
    a.set("x/0", raw)
    assert b.get("x/0") == raw
    assert not b.check(["x/0", "x/1"]) and not other.check(["x/0"])
    later = in_thread(lambda: b.get("x/1"))
    a.set("x/1", "text")
    assert later() == b"text" and b.check(["x/0", "x/1"])
    assert [a.add("n", 2), b.add("n", -5), a.add("n", 1)] == [2, -3, -2]
    with pytest.raises(dist.DistStoreError, match="nobody has set"):
        a.wait(["never"], SHORT)
    assert a.compare_set("c", "", "1") == b"1" and b.compare_set("c", "0", "2") == b"1"
    assert b.compare_set("c", "1", "2") == b"2"
    assert a.delete_key("c") and not b.delete_key("c")
    prefixed = dist.PrefixStore("p", a.clone())
    prefixed.set("k", "v")
    assert b.get("p/k") == b"v"


def test_with_a_key_come_those_beside_it_as_many_as_a_message_takes(
    connect: Callable[..., EpochStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = connect(), connect()
    monkeypatch.setattr(rendezvous_server, "SHELF", 1000)
    for number in range(25):
        a.set(f"g/{number}", bytes([number]) * 100)
        a.set(f"h/{number}", b"other")
    a.add("g/sum", 3)
    assert a.check(["g/24"])
    assert b.get("g/13") == bytes([13]) * 100
    assert set(b._brought) == {f"g/{number}" for number in range(10, 20)}
    a.set("g/13", b"new")
    a.delete_key("g/14")
    assert not a.check(["g/14"]) and connect().get("g/13") == b"new"
    assert b.multi_get(["g/0", "h/0", "g/24", "g/sum"]) == [bytes(100), b"other", bytes([24]) * 100, b"3"]
    waiting = in_thread(lambda: dist.PrefixStore("p", b).multi_get(["x", "y", "x"]))
    a.set("p/x", "1")
    a.set("p/y", "2")
    assert [bytes(value) for value in waiting()] == [b"1", b"2", b"1"]


def test_members_meet_and_ask_who_is_late(connect: Callable[..., EpochStore]) -> None:
    a, b, c = connect(), connect(), connect()
    group = GroupId.of(range(4), 0)
    met = [in_thread(lambda s=s: s.meet(str(group), range(4), (), SHORT)) for s in (a, b)]
    assert c.next_asked() == Series(group)
    d = connect()
    assert d.next_asked() == Series(group), "who comes later hears of it as well"
    met += [in_thread(lambda s=s: s.meet(str(group), range(4), (), LONG)) for s in (c, d)]
    for result in met:
        result()


def test_who_is_new_is_asked_at_once_and_who_has_come_is_not(connect: Callable[..., EpochStore]) -> None:
    a, b, c = connect(), connect(), connect()
    first, second = GroupId.of(range(3), 0), GroupId.of(range(3), 1)
    for member in (a, b):
        in_thread(lambda s=member: s.meet(str(first), range(3), [1, 2], LONG))
    assert c.next_asked() == Series(first)
    waiting = in_thread(lambda: c.meet(str(second), range(3), [1], LONG))
    assert b.next_asked() in (Series(first), Series(second))  # the first, if `a` was there before it
    while not b.check(["done"]) and not b._asked:
        b.set("done", "")
    c.close()
    with pytest.raises(dist.DistStoreError, match="is gone"):
        waiting()
    assert not c._asked, "it was asked once, by two"


def test_an_agent_has_other_things_to_do_than_to_answer_all_roles_at_once() -> None:
    class Told:
        peer = "a member"

        def post(self, reply: object) -> None:
            told.append(reply)

    async def all_meet() -> list[int]:
        store, group, members = (
            rendezvous_server._Store(),
            f"0-{COUNT - 1}:1#0",
            [Told() for _ in range(COUNT)],
        )
        seen = []
        for role, member in enumerate(members):
            store.join(member, role)  # type: ignore[arg-type]
            store.handle(member, WaitForKeys(0, ["key"]))  # type: ignore[arg-type]
        for request in (SetKey("key", b""), Ask(group, f"0-{COUNT - 1}:1")):
            store.handle(members[0], request)  # type: ignore[arg-type]
        for member in members:
            store.handle(member, Meet(1, group, COUNT, None))  # type: ignore[arg-type]
        while not seen or seen[-1] < len(told):
            seen.append(len(told))
            await asyncio.sleep(0)
        return seen

    told: list[object] = []
    seen = asyncio.run(all_meet())
    assert len(told) == 3 * COUNT, "values, asks, and that all have come"
    assert max(b - a for a, b in pairwise([0, *seen])) <= 3 * rendezvous_server.AT_ONCE


def test_a_replacement_of_a_members_connection_counts_once(connect: Callable[..., EpochStore]) -> None:
    """As nobody is two members."""
    a, b = connect(), connect()
    group = GroupId.of(range(2), 0)
    twice = [in_thread(lambda: a.meet(str(group), range(2), (), LONG)) for _ in range(2)]
    assert not b.check(["k"])
    b.meet(str(group), range(2), (), LONG)
    for result in twice:
        result()


def test_gloo_connects_over_it(connect: Callable[..., EpochStore]) -> None:
    def member(rank: int) -> list[float]:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("g/", connect()), rank, 3, LONG)
        tensor = torch.full((2,), float(rank))
        gloo.allreduce([tensor]).wait()
        return tensor.tolist()

    assert [result() for result in [in_thread(lambda r=r: member(r)) for r in range(3)]] == [[3.0, 3.0]] * 3


def test_the_end_of_an_epoch_wakes_its_members(stores: Stores, connect: Callable[..., EpochStore]) -> None:
    old, new = connect(1), connect(2)
    waiting = [
        in_thread(lambda: old.get("never")),
        in_thread(lambda: old.meet(str(GROUP), range(2), (), LONG)),
    ]
    new.set("k", "v")
    assert new.check(["k"])
    stores.loop.call_soon_threadsafe(stores.begin, 2)
    for result in waiting:
        with pytest.raises(dist.DistStoreError, match=r"store of epoch 1 at .* is gone"):
            result()
    with pytest.raises(dist.DistStoreError, match="is gone"):
        connect(1).add("n", 1)
    assert new.check(["k"])


@pytest.mark.parametrize("dies", [True, False], ids=["with its node", "alone"])
def test_a_store_that_goes_is_told_of_if_its_epoch_goes_on(
    dies: bool, stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who hears of a node's death by the end of its store, before the controller's word, says nothing."""
    monkeypatch.setattr(inner, "STORE_LOST", timedelta(seconds=60 if dies else 0.1))
    looked: list[None] = []

    def alive() -> bool:
        looked.append(None)
        return not dies or len(looked) < 4

    opener = inner.Opener(1, stores.address, SECRET, 3, alive, lambda _: None)
    listening = in_thread(opener.listen)
    while not (store := stores._epochs.get(1)) or not store.channels:
        time.sleep(0.01)
    ended = time.monotonic()
    stores.loop.call_soon_threadsafe(stores.begin, 2)
    listening()
    assert len(looked) == 4 if dies else time.monotonic() > ended + 0.1
    said = [record.getMessage() for record in caplog.records if record.name == inner.log.name]
    assert [text.count("is gone") for text in said] == ([] if dies else [1])


def test_who_closes_wakes_his_own_threads(connect: Callable[..., EpochStore]) -> None:
    store = connect()
    waiting = in_thread(lambda: store.get("never"))
    store.close()
    with pytest.raises(dist.DistStoreError, match="is gone"):
        waiting()


def test_strangers_have_no_store(stores: Stores) -> None:
    host, _, port = stores.address.rpartition(":")
    with pytest.raises(RuntimeError):
        dist.TCPStore(host, int(port), None, False, timedelta(seconds=1), wait_for_workers=False)
    with pytest.raises(AuthenticationError):
        EpochStore(stores.address, b"another job's", 1, 0)
    with socket.create_connection((host, int(port)), timeout=60) as stranger, pytest.raises(OSError):
        for _ in range(1 << 10):  # a GiB, which nobody takes
            stranger.sendall(bytes(1 << 20))


def test_a_store_has_bounds(
    stores: Stores, connect: Callable[..., EpochStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect()
    with pytest.raises(ValueError, match="a store takes"):
        store.set("k", bytes(MAX_VALUE + 1))
    store.set("k", bytes(1000))
    assert store.check(["k"])
    monkeypatch.setattr(rendezvous_server, "MAX_EPOCH", 3000)
    store.set("l", bytes(2000))
    with pytest.raises(dist.DistStoreError, match="is gone"):
        store.check(["l"])
    assert not connect().check(["l"]), "others go on"

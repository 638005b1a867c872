"""Nonsense at each listener: refused with a clear word, by a process that goes on, for no more than its size.

What is malformed is made from the types of the messages (see `samples`), so a new message is in it as soon as
it is in its union. Most goes through the decoders, which is where alone something is called malformed; some
through real sockets, before, during and after the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import json
import re
import socket
import tracemalloc
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core.copies import fetch, make, push
from core.fleet import Fleet
from core.protocol.samples import kinds, sample, spoiled
from core.real_agent import RealAgent
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.cli.ask import status
from ft_core.comm.rendezvous import EpochStore
from ft_core.comm.rendezvous_server import Stores
from ft_core.errors import ProtocolError
from ft_core.net.transport import TcpTransport
from ft_core.process import refusals
from ft_core.protocol import acceptor, handshake, messages, pulses, store, transfers
from ft_core.protocol.codec import MAX_BYTES, Decoder, encode
from ft_core.protocol.framing import HEADER, Frames
from ft_core.protocol.sockets import listen, listener_of, split_address
from ft_core.state.replicas import ReplicaStore

SECRET = b"transport test secret"
ENOUGH = 10_000
"""Malformed frames for each listener."""
TIMES = 64
"""What a message takes in memory, at most, for each of its bytes."""

LISTENERS: dict[str, tuple[Any, Decoder[Any]]] = {
    "controller": (
        messages.FromAgent | messages.FromCtl | messages.RouteRequest | messages.LeavingRelay,
        messages.FROM_CLIENT,
    ),
    "agent": (messages.FromWorker, messages.FROM_WORKER),
    "transport": (transfers.Request, transfers.REQUEST),
    "store": (store.Request, store.REQUEST),
    "pulses": (messages.Pulse, messages.FROM_PULSE),
}
"""By who listens, what it takes."""
CLIENTS: dict[str, tuple[Any, Decoder[Any]]] = {
    "to an agent": (messages.ToAgent | messages.UseRelay | messages.RelayLives, messages.TO_AGENT),
    "to a worker": (messages.ToWorker, messages.TO_WORKER),
    "to ftctl": (messages.ToCtl, messages.TO_CTL),
    "of a transport": (transfers.Answer, transfers.ANSWER),
    "of a store": (store.Reply, store.REPLY),
}

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([10**400, -(10**400), float("nan"), float("inf"), 1e308, -0.0, "\ud800", "\0", "🐫" * 9]),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    st.integers(1, 3000).map(lambda depth: _nested(depth)),
)
NAMES = st.text(max_size=12) | st.sampled_from(["type", "Exit", "__class__", "epoch"])
RAW = [
    b"",
    b"\xff\xfe",
    b'{"type":"\xff"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"1" * 5000,
    b'{"type":NaN}',
    b'{"type":"Heartbeat","epoch":1e999}',
    b"null",
    b'"Exit"',
]


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(min(depth, 300)):
        value = [value]
    return value


def refused(decoder: Decoder[Any], body: bytes) -> bool:
    """Whether it is refused, with a word that can be shown. Otherwise it is a message, to the letter."""
    try:
        message = decoder.decode(body, "a peer")
    except ProtocolError as error:
        assert str(error).startswith("a peer sent what is no message here: ") and len(str(error)) < 400
        return True
    assert same(json.loads(body), json.loads(msgspec.json.encode(message))), f"{body!r} taken for {message}"
    return False


def same(sent: Any, taken: Any) -> bool:
    """Whether all that was sent is there, as it was, and nothing was made of it that it was not."""
    if isinstance(sent, dict) and isinstance(taken, dict):
        return all(key in taken and same(value, taken[key]) for key, value in sent.items())
    if isinstance(sent, list) and isinstance(taken, list):
        return len(sent) == len(taken) and all(map(same, sent, taken))
    if type(sent) is int and type(taken) is float:
        return float(sent) == taken  # the nearest there is to a whole number of twenty digits
    return sent == taken and (type(sent) is type(taken) or {type(sent), type(taken)} == {int, float})


@pytest.mark.parametrize("who", [*LISTENERS, *CLIENTS])
def test_what_is_malformed_is_refused_by_the_decoder(who: str) -> None:
    union, decoder = (LISTENERS | CLIENTS)[who]
    valid = [sample(kind) for kind in kinds(union)]
    for message in valid:
        assert not refused(decoder, json.dumps(message).encode()), message
    assert all(refused(decoder, body) for body in RAW)
    for message, value in itertools.product(valid, ("1", "1.5", "true", "null", 0, 1, 1.0, True, [], {}, "")):
        for body in spoiled(message, "more", value):
            refused(decoder, body)
    each = sum(1 for message in valid for _ in spoiled(message, "x", 0))
    enough = ENOUGH if who in LISTENERS else ENOUGH // 10
    count = 0

    @settings(derandomize=True, max_examples=2 * enough // each + 1, database=None)
    @given(NAMES, VALUES)
    def spoil(name: str, value: Any) -> None:
        nonlocal count
        for message in valid if count < enough else ():
            count += sum(refused(decoder, body) for body in spoiled(message, name, value))

    spoil()
    assert count >= enough


@pytest.mark.parametrize("who", [*LISTENERS, *CLIENTS])
def test_a_message_takes_no_more_memory_than_its_size_allows(who: str) -> None:
    """Whatever is repeated in it, in each place where something can be: as much as 100 kB hold."""
    union, decoder = (LISTENERS | CLIENTS)[who]
    tracemalloc.start()
    try:
        for message in map(sample, kinds(union)):
            for body in grown(message):
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                refused(decoder, body)
                taken = tracemalloc.get_traced_memory()[1] - before
                assert taken < TIMES * len(body), f"{taken / len(body)} bytes for each of {body[:200]!r}"
    finally:
        tracemalloc.stop()


def grown(message: dict[str, Any]) -> Iterator[bytes]:
    """With very many elements in one of its lists or objects, or many times the smallest there are."""
    for field, value in message.items():
        if isinstance(value, list):
            element = json.dumps(value[0])
            yield replaced(message, field, f"[{','.join([element] * (100_000 // len(element)))}]")
        elif isinstance(value, dict) and value:
            element = json.dumps(next(iter(value.values())))
            rows = (f'"{number}":{element}' for number in range(100_000 // (len(element) + 8)))
            yield replaced(message, field, f"{{{','.join(rows)}}}")
        for small in ("[]", "{}", '""', "0"):
            yield replaced(message, field, f"[{','.join([small] * 30_000)}]")


def replaced(message: dict[str, Any], field: str, text: str) -> bytes:
    return json.dumps({**message, field: "HERE"}).replace('"HERE"', text).encode()


# -- sockets -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "PERIOD", 1e9)


def hostile(who: str) -> list[bytes]:
    """Bodies of frames for this listener, some of each kind of message."""
    union, decoder = LISTENERS[who]
    found = list(RAW)
    for kind in kinds(union):
        bodies = [body for body in spoiled(sample(kind), "\0", 10**400) if refused(decoder, body)]
        found += bodies[:: max(1, len(bodies) // 3)]
    return found


def strangers(address: str) -> None:
    """Whoever does not know the secret, and frames that do not come from a peer that does. Each ends."""
    hello = handshake.Handshake(b"another secret", "a server", b"", client=True).hello
    large = HEADER.pack(b"FTW1", 0xFFFFFFFF, 1 << 63, bytes(32))
    words = [
        b"",
        b"\0" * 40,
        b"\xff" * 4000,
        large * 3,
        hello,
        hello + bytes(32),
        hello[:20],
        b"GET /" * 2000,
    ]
    words += [hello[:4] + version.to_bytes(4, "big") + bytes(64) for version in (0, 1, 3, 0xFFFFFFFF)]
    for word in words * 3:
        told = 0
        with connected(address) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(word)
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(1 << 16):
                told += len(part)
        assert told <= 72, "a hello, and that it is refused"


def connected(address: str) -> socket.socket:
    if not address.startswith("unix:"):
        return socket.create_connection(split_address(address), timeout=60)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(address.removeprefix("unix:"))
    return sock


def members(address: str, secret: bytes, who: str, hello: msgspec.Struct | None = None) -> None:
    """Frames of one who knows the secret, one for each connection, which the listener ends.

    `hello`: what they say before, the second time.
    """
    spoils = [partial(Frames.pack, body=body) for body in hostile(who)]
    for spoil in (*spoils, unsealed, oversized, foreign, with_payload):
        for first in (None, hello) if hello is not None else (None,):
            sock, frames = greeted(address, secret)
            with sock, contextlib.suppress(ConnectionError):
                if first is not None:
                    sock.sendall(frames.pack(encode(first)))
                sock.sendall(spoil(frames))
                while sock.recv(1 << 16):
                    pass


def greeted(address: str, secret: bytes) -> tuple[socket.socket, Frames]:
    sock = connected(address)
    hands = handshake.Handshake(secret, address, listener_of(sock.getpeername()), client=True)
    sock.sendall(hands.hello)
    sock.sendall(hands.answer(sock.recv(hands.HELLO_BYTES, socket.MSG_WAITALL)))
    hands.confirm(sock.recv(hands.PROOF_BYTES, socket.MSG_WAITALL))
    return sock, hands.frames()


def datagrams(address: str, secret: bytes) -> None:
    """Of strangers, and nonsense of one who knows the secret."""
    pulse = pulses.Seal(secret).pack(messages.Pulse("1a", "node0", 1, 0.0))
    sealed = pulses.Seal(secret)
    bodies = [pulse[:4] + hmac.digest(sealed._key, body, "sha256") + body for body in hostile("pulses")]
    other = pulses.Seal(b"another").pack(messages.Pulse("1a", "node0", 1, 0.0))
    with pulses.sender(address) as sock:
        for word in (b"", b"GET /", other, pulse[:-1], pulse * 9, bytes(60_000), *bodies):
            with contextlib.suppress(OSError):  # larger than what can be sent at all
                sock.send(word)


def unsealed(frames: Frames) -> bytes:
    return HEADER.pack(b"FTW1", 2, 0, bytes(32)) + b"{}"


def oversized(frames: Frames) -> bytes:
    return HEADER.pack(b"FTW1", MAX_BYTES + 1, 0, bytes(32))


def foreign(frames: Frames) -> bytes:
    return b"SSH-" + frames.pack(b"{}")[4:]


def with_payload(frames: Frames) -> bytes:
    return frames.pack(b'{"type":"Exit"}', 1 << 60) + bytes(1000)


@contextmanager
def no_memory() -> Iterator[None]:
    """What the listener, in this process, takes in the meantime is less than a few of those frames."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        assert tracemalloc.get_traced_memory()[1] - before < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_transport_refuses_nonsense_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    replicas = ReplicaStore()
    transport, peer = TcpTransport(replicas, SECRET), TcpTransport(ReplicaStore(), SECRET)
    data = make(3 << 20)
    try:
        push(peer, transport.address, data, 1)
        held, received = replicas.versions(), transport.received_bytes
        with no_memory():
            strangers(transport.address)
            members(transport.address, SECRET, "transport")
        assert (replicas.versions(), transport.received_bytes) == (held, received)
        assert fetch(peer, transport.address, data[0].id)[2] == data[1]
    finally:
        peer.close()
        transport.close()
    assert_aggregated([record.getMessage() for record in caplog.records])


def test_a_store_refuses_nonsense_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    stores = Stores.in_thread("127.0.0.1", SECRET)
    good = EpochStore(stores.address, SECRET, 1, 0)
    try:
        good.set("k", "v")
        assert good.check(["k"])
        held = dict(stores._epochs[1]._values)
        with no_memory():
            strangers(stores.address)
            members(stores.address, SECRET, "store", store.JoinEpoch(1, 0))
        assert stores._epochs[1]._values == held and good.get("k") == b"v"
        assert good.add("n", 2) == 2
    finally:
        good.close()
    assert_aggregated([record.getMessage() for record in caplog.records])


def test_an_agent_refuses_nonsense_at_its_workers_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers, and its part in the job, do not notice."""

    async def test() -> None:
        address = f"unix:\0ft-test-{uuid.uuid4().hex}"
        async with Fleet(tmp_path / "job", nodes=1, ranks=[], replicas=0) as fleet:
            agent = RealAgent(fleet.settings, fleet.job_dir, "node0", 0)
            agent.serve()
            await fleet.event("resumed")
            serving = asyncio.create_task(
                acceptor.serve(listen(address), agent.secret, "node0", agent._accept_worker)
            )
            with no_memory():
                await asyncio.to_thread(strangers, address)
                await asyncio.to_thread(members, address, fleet.secret, "agent")
            agent.step()
            await fleet.until(lambda: agent.committed() == [2])
            assert not fleet.events("detected") and not fleet.events("suspected")
            serving.cancel()
            await agent.end()

    asyncio.run(test())
    assert_aggregated([record.getMessage() for record in caplog.records])


def test_a_controller_refuses_nonsense_and_leads(tmp_path: Path) -> None:
    async def test() -> None:
        async with Fleet(tmp_path / "job", nodes=2) as fleet:
            await fleet.event("resumed")
            before, known = await asyncio.to_thread(status, fleet.job_dir), len(fleet.events())
            with no_memory():
                await asyncio.to_thread(strangers, fleet.settings.controller)
                address = fleet.settings.controller
                await asyncio.to_thread(datagrams, address, fleet.secret)
                await asyncio.to_thread(members, address, fleet.secret, "controller", messages.CtlHello(""))
            after = await asyncio.to_thread(status, fleet.job_dir)
            assert dataclasses.replace(after, roles=before.roles) == before
            assert {e["event"] for e in fleet.events()[known:]} == {"refused"}
            assert_aggregated([e["reason"] for e in fleet.events("refused")])
            fleet["node0"].crash(0)
            await fleet.event("resumed", 2)

    asyncio.run(test())


def assert_aggregated(said: list[str]) -> None:
    """Each of the first is told with its reason; of the others, only how many."""
    reasons = "secret|protocol|version|handshake|no message|frame"
    assert len(said) == refusals.TOLD and all(re.search(reasons, each) for each in said), said

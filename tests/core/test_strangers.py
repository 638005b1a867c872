"""Who does not know the job's secret gets nothing, and keeps nobody out."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from core.copies import make, push
from harness import environment

from ft_core.comm.rendezvous import EpochStore, Stores
from ft_core.errors import AuthenticationError
from ft_core.net.transport import TcpTransport
from ft_core.process.descriptors import raise_limit
from ft_core.protocol import door, handshake
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.codec import Decoder
from ft_core.protocol.connection import Connection
from ft_core.protocol.handshake import Handshake
from ft_core.protocol.sockets import listen, split_address
from ft_core.state.replicas import ReplicaStore

CROWDED = Path(__file__).with_name("crowded.py")
SECRET = b"transport test secret"
ANYTHING: Decoder[Any] = Decoder(Any)
MEMBERS = 2000
MANY = 300
assert MANY > door.MAX_GUESTS


class Silent:
    """Connections that say nothing; for each that is closed there is another at once."""

    def __init__(self, address: str) -> None:
        self._place = split_address(address)
        self._over = threading.Event()
        self.closed = 0
        self._sockets = [socket.create_connection(self._place) for _ in range(MANY)]
        self._thread = threading.Thread(target=self._insist)
        self._thread.start()

    def _insist(self) -> None:
        poll, held = select.poll(), {sock.fileno(): sock for sock in self._sockets}
        for number in held:
            poll.register(number, select.POLLRDHUP)
        while not self._over.is_set():
            for number, _ in poll.poll(50):
                poll.unregister(number)
                held.pop(number).close()
                self.closed += 1
                another = socket.create_connection(self._place)
                held[another.fileno()] = another
                poll.register(another.fileno(), select.POLLRDHUP)
        for sock in held.values():
            sock.close()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def test_silent_connections_do_not_keep_state_from_moving() -> None:
    store, data = ReplicaStore(), make(10 << 20)
    transport, peer = TcpTransport(store, SECRET), TcpTransport(ReplicaStore(), SECRET)
    strangers = Silent(transport.address)
    try:
        for version in range(3):
            peer.close_peers()  # so that each push needs connections of its own
            push(peer, transport.address, data, version)
        assert list(store.versions().values()) == [[1, 2]]
    finally:
        strangers.end()
        peer.close()
        transport.close()


def test_silent_connections_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit in time, even: one too many, and the oldest is closed."""
    monkeypatch.setattr(handshake, "SECONDS", 3600.0)
    stores = Stores.in_thread("127.0.0.1", SECRET)
    before = len(os.listdir("/proc/self/fd"))
    sockets = [socket.create_connection(split_address(stores.address)) for _ in range(MANY)]
    try:
        for sock in sockets[: MANY - door.MAX_GUESTS]:
            sock.settimeout(60)
            while sock.recv(100):  # a greeting, and then the end
                pass
        held = len(os.listdir("/proc/self/fd")) - before - MANY
        assert held <= door.MAX_GUESTS + 3
        store = EpochStore(stores.address, SECRET, 1, 0)
        store.set("k", "v")
        assert store.get("k") == b"v"
        store.close()
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_running_out_of_descriptors_is_told_once(kind: str) -> None:
    """In a process of its own, which cannot open another file for a while."""
    done = subprocess.run(
        [sys.executable, str(CROWDED), kind], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.stdout == "nobody came in; then somebody did\n", done.stderr
    assert done.stderr.count("node a accepts no more connections: all of its") == 1
    assert "ulimit -Hn" in done.stderr and "Too many open files" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_limit_is_raised_and_one_that_is_too_low_is_told() -> None:
    """In a process of its own, under `ulimit`."""
    code = (
        "import resource; from ft_core.settings import *\n"
        "from ft_core.process.descriptors import check_limit\n"
        "check_limit('node a', *Settings(100, 8, Command('x'), spares=2).size)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    said = []
    for limits in ("ulimit -Sn 64", "ulimit -n 1000"):
        command = ["bash", "-c", f'{limits}; exec {sys.executable} -c "$1"', "bash", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
        said.append((int(done.stdout), done.stderr))
    assert said[0][0] >= 2000 and not said[0][1]
    assert said[1][0] == 1000
    assert "node a may have 1000 files" in said[1][1] and "may need 2272 with 800 roles" in said[1][1]


class Busy:
    """A server whose loop takes so many seconds to go round, once it has begun."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sock = listen("127.0.0.1")
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(door.serve(self._sock, "a test", self._connected))
        self._work()
        await self._over.wait()
        serving.cancel()

    def _work(self) -> None:
        time.sleep(self._seconds)
        self._loop.call_soon(self._work)

    async def _connected(self, connection: Connection) -> None:
        with suppress(AuthenticationError, ConnectionError):
            channel = await AsyncChannel.accept(connection, SECRET, ANYTHING)
            await channel.recv()
        connection.close()

    def end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        else:
            self._sock.close()


@pytest.mark.parametrize("strangers", [0, MANY])
def test_members_that_come_at_once_to_a_busy_machine_all_get_in(
    strangers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first try. A stranger may not stay for as long as the loop takes to go round once."""
    monkeypatch.setattr(door, "STAY", 0.02)
    monkeypatch.setattr(handshake, "SECONDS", 3600.0)
    monkeypatch.setattr(handshake, "PATIENCE", 3600.0)
    backlog = int(Path("/proc/sys/net/core/somaxconn").read_text())
    count = min(MEMBERS, backlog - MANY, (raise_limit() - 1000) // 2)
    server = Busy(0.03)
    silent = Silent(server.address) if strangers else None
    members: list[tuple[Handshake, socket.socket]] = []
    try:
        for _ in range(count):
            hands = Handshake(SECRET, server.address, client=True)
            members.append((hands, socket.create_connection(split_address(server.address))))
            members[-1][1].sendall(hands.hello)
        server.begin()
        for hands, sock in members:
            sock.sendall(hands.answer(sock.recv(hands.HELLO_BYTES, socket.MSG_WAITALL)))
        for hands, sock in members:
            hands.confirm(sock.recv(hands.PROOF_BYTES, socket.MSG_WAITALL))
    finally:
        for _, sock in members:
            sock.close()
        if silent is not None:
            silent.end()
        server.end()


def test_who_makes_room_in_the_lobby(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest that has nothing to say; no member, nor whoever has said what nobody has read yet."""
    monkeypatch.setattr(door, "MAX_GUESTS", 3)
    monkeypatch.setattr(door, "MAX_KNOWN", 2)
    monkeypatch.setattr(door, "STAY", 0.0)
    lobby, left = door._Lobby(), list[str]()
    with ExitStack() as stack:

        def come(name: str, unread: bool = False) -> Callable[[bytes], bool]:
            return stack.enter_context(lobby.stay(lambda: left.append(name), lambda: unread))

        assert come("a member")(b"its nonce")
        come("unread", unread=True)
        come("first")
        assert lobby.room() == 2, "and one would leave"
        come("second")
        assert not come("overheard")(b"its nonce") and left == ["first"]
        come("third")
        assert left == ["first", "second"] and lobby.room() == 2
        monkeypatch.setattr(door, "STAY", 3600.0)
        assert lobby.room() == 0
        assert come("another member")(b"another nonce")
        monkeypatch.setattr(door, "STAY", 0.0)
        assert lobby.room() == 0, "as many members are in the handshake as there may be"
    assert lobby.room() == 3 and left == ["first", "second"]


def test_a_member_is_known_by_its_first_bytes() -> None:
    client, server = (Handshake(SECRET, "a peer", client=client) for client in (True, False))
    stranger = Handshake(b"another secret", "a peer", client=True)
    assert server.meet(client.hello) == client.hello[-32:]
    assert server.meet(stranger.hello) == server.meet(server.hello) == b"", "what a server says helps nobody"
    with pytest.raises(AuthenticationError):
        server.meet(b"nothing" * 5 + b"of it")


def test_members_have_more_time_than_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came first proves who it is after a stranger that came later was turned away for silence."""
    monkeypatch.setattr(handshake, "SECONDS", 2.0)
    monkeypatch.setattr(handshake, "PATIENCE", 3600.0)
    server = Busy(0.0)
    server.begin()
    try:
        hands = Handshake(SECRET, server.address, client=True)
        with socket.create_connection(split_address(server.address)) as member:
            member.sendall(hands.hello)
            proof = hands.answer(member.recv(hands.HELLO_BYTES, socket.MSG_WAITALL))
            with socket.create_connection(split_address(server.address)) as stranger:
                while stranger.recv(100):  # a greeting, and then the end
                    pass
            member.sendall(proof)
            hands.confirm(member.recv(hands.PROOF_BYTES, socket.MSG_WAITALL))
    finally:
        server.end()

"""Who does not know the job's secret gets nothing, and keeps nobody out."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from core.copies import make, push
from harness import environment
from waiting import wait_for_value

from ft_core.comm.rendezvous import EpochStore
from ft_core.comm.rendezvous_server import Stores
from ft_core.errors import AuthenticationError
from ft_core.net.transport import TcpTransport
from ft_core.process.descriptors import raise_limit
from ft_core.protocol import acceptor, handshake
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.channel import Channel
from ft_core.protocol.codec import Decoder
from ft_core.protocol.connection import Connection
from ft_core.protocol.handshake import Handshake
from ft_core.protocol.sockets import listen, listener_of, source_of, split_address
from ft_core.state.replicas import ReplicaStore

CROWDED = Path(__file__).with_name("crowded.py")
SECRET = b"transport test secret"
ANYTHING: Decoder[Any] = Decoder(Any)
MEMBERS = 2000
MANY = 300
assert MANY > acceptor.MAX_GUESTS


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


def test_who_says_something_else_or_leaves_is_let_go() -> None:
    server = Busy(0.0)
    server.begin()
    try:
        for word, ends in ((b"", True), (b"GET / HTTP/1.0\r\n\r\n", True), (bytes(1000), False)):
            with socket.create_connection(split_address(server.address), timeout=60) as sock:
                sock.sendall(word)
                if ends:
                    sock.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    while sock.recv(100):
                        pass
    finally:
        server.end()


def test_who_says_too_little_is_let_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 0.1)
    server = Busy(0.0)
    server.begin()
    try:
        with socket.create_connection(split_address(server.address), timeout=60) as sock:
            sock.sendall(b"half a hello")
            with suppress(ConnectionResetError):
                assert not sock.recv(100)
    finally:
        server.end()


def test_silent_connections_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit in time, even: one too many, and the oldest is closed."""
    monkeypatch.setattr(handshake, "SECONDS", 3600.0)
    stores = Stores.in_thread("127.0.0.1", SECRET)
    before = len(os.listdir("/proc/self/fd"))
    sockets = [socket.create_connection(split_address(stores.address)) for _ in range(MANY)]
    try:
        for sock in sockets[: MANY - acceptor.MAX_GUESTS]:
            sock.settimeout(60)
            assert not sock.recv(100)
        held = len(os.listdir("/proc/self/fd")) - before - MANY
        assert held <= acceptor.MAX_GUESTS + 3
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


class Full(socket.socket):
    """A listener of a process that may have no more descriptors."""

    full = False

    def accept(self) -> Any:
        if self.full:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture
def full() -> Iterator[tuple[Full, acceptor._Porch, list[socket.socket]]]:
    """Three are there that say nothing, and one who says something else; the next one cannot be accepted."""
    with Full(fileno=listen("127.0.0.1").detach()) as listener, ExitStack() as stack:
        porch = acceptor._Porch(listener, SECRET)
        stack.callback(porch.close)

        def come() -> socket.socket:
            return stack.enter_context(socket.create_connection(listener.getsockname()))

        guests = [come() for _ in range(3)]
        assert porch.take(10, 5) == [] and sum(map(len, porch._outside.values())) == 3
        listener.full = True
        come()
        yield listener, porch, guests


def are_closed(guests: list[socket.socket]) -> list[bool]:
    return [bool(select.select([each], [], [], 0)[0]) for each in guests]


def test_where_descriptors_run_out_the_oldest_that_says_nothing_makes_room(full: Any) -> None:
    listener, porch, guests = full
    with pytest.raises(OSError, match="Too many open files"):
        porch.take(10, 5)
    assert are_closed(guests) == [True, False, False]
    listener.full = False
    assert porch.take(10, 5) == [] and are_closed(guests) == [True, False, False]
    assert sum(map(len, porch._outside.values())) == 3


def test_where_nobody_can_be_accepted_those_who_are_there_are_looked_after(
    full: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who says something else comes in, and who has been silent for too long goes."""
    _, porch, guests = full
    guests[2].sendall(bytes(acceptor._ENOUGH))
    wait_for_value(lambda: len(acceptor._said(outside(porch)[2])), acceptor._ENOUGH)
    monkeypatch.setattr(handshake, "SECONDS", 0.0)
    [let_in] = porch.take(10, 5)
    let_in.close()
    assert are_closed(guests[:2]) == [True, True] and not outside(porch)


def outside(porch: acceptor._Porch) -> list[socket.socket]:
    return [each.sock for there in porch._outside.values() for each in there.values()]


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

    def __init__(self, seconds: float, sock: socket.socket | None = None) -> None:
        self._seconds = seconds
        self._sock = sock or listen("127.0.0.1")
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(acceptor.serve(self._sock, SECRET, "a test", self._connected))
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


def member_at(address: str) -> tuple[Handshake, socket.socket]:
    """Who has said its first words there."""
    sock = socket.create_connection(split_address(address))
    hands = Handshake(SECRET, address, listener_of(sock.getpeername()), client=True)
    sock.sendall(hands.hello)
    return hands, sock


@pytest.mark.parametrize("strangers", [0, MANY])
def test_members_that_come_at_once_to_a_busy_machine_all_get_in(
    strangers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first try, in a loop that takes its time to go round once."""
    monkeypatch.setattr(acceptor, "ANSWER", 3600.0)
    monkeypatch.setattr(handshake, "SECONDS", 3600.0)
    monkeypatch.setattr(handshake, "PATIENCE", 3600.0)
    backlog = int(Path("/proc/sys/net/core/somaxconn").read_text())
    count = min(MEMBERS, backlog - MANY, (raise_limit() - 1000) // 2)
    server = Busy(0.03)
    silent = Silent(server.address) if strangers else None
    members: list[tuple[Handshake, socket.socket]] = []
    try:
        for _ in range(count):
            members.append(member_at(server.address))
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


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lobby]:
    monkeypatch.setattr(acceptor, "MAX_GUESTS", 3)
    monkeypatch.setattr(acceptor, "MAX_KNOWN", 2)
    with ExitStack() as stack:
        yield Lobby(stack)


class Lobby:
    """Who comes into it, and who has left."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._lobby = stack, acceptor._PendingHandshakes()
        self.left: list[str] = []
        self.room = self._lobby.room

    def come(self, name: str, source: str = "there", unread: bool = False) -> Callable[[bytes], bool]:
        return self._stack.enter_context(
            self._lobby.stay(source, lambda: self.left.append(name), lambda: unread)
        )


def test_the_oldest_that_says_nothing_makes_room(pending: Lobby) -> None:
    """No member, nor whoever has said what nobody has read yet."""
    assert pending.come("a member")(b"its nonce")
    pending.come("unread", unread=True)
    pending.come("first")
    assert pending.room() == 1
    pending.come("second")
    assert pending.room() == 2, "who would leave"
    assert not pending.come("overheard")(b"its nonce") and pending.left == ["first"]
    pending.come("third")
    assert pending.left == ["first", "second"]


def test_many_of_one_address_are_in_the_way_of_each_other(pending: Lobby) -> None:
    pending.come("a lone one", "elsewhere")
    for number in range(5):
        pending.come(str(number))
    assert pending.left == ["0", "1", "2"]


def test_a_lobby_of_those_who_are_not_read_yet_is_full(pending: Lobby) -> None:
    for number in range(3):
        pending.come(str(number), unread=True)
    assert pending.room() == 0 and not pending.left


def test_members_wait_for_members_that_do_answer(pending: Lobby, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what repeats their first words, and cannot answer, keeps them out for a moment only."""
    assert pending.come("first")(b"1") and pending.room() and pending.come("second")(b"2")
    assert pending.room() == 0
    monkeypatch.setattr(acceptor, "ANSWER", 0.0)
    assert pending.room() and pending.come("third")(b"3") and pending.left == ["first"]


def test_what_was_overheard_is_remembered_while_it_is_worth_something(
    pending: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(acceptor.time, "monotonic", lambda: now)
    for number in range(10):
        assert pending.come(str(number))(b"%d" % number)
    assert not pending.come("again")(b"3")
    now += 2 * handshake.FRESH + 1
    assert pending.come("later")(b"new")
    assert list(pending._lobby._heard) == [b"new"]


def test_where_a_connection_comes_from() -> None:
    class Sock:
        family = socket.AF_INET6

        def __init__(self, host: str) -> None:
            self.getpeername = lambda: (host, 1)

    def source(host: str) -> str:
        return source_of(Sock(host))

    assert source("10.0.0.1") == source("::ffff:10.0.0.1") != source("10.0.0.2")
    assert source("2001:db8::1") == source("2001:db8::ffff") != source("2001:db8:0:1::1")
    assert source("127.0.0.1") == source("127.9.9.9") == source("::1") != source("10.0.0.1")
    assert source("fe80::1%eth0") == source("fe80::2%eth0")


def test_a_member_is_known_by_its_first_bytes() -> None:
    client, server = (Handshake(SECRET, "a peer", b"29400", client=client) for client in (True, False))
    stranger = Handshake(b"another secret", "a peer", b"29400", client=True)
    assert server.meet(client.hello) == client.hello[-32:]
    assert server.meet(stranger.hello) == server.meet(server.hello) == b"", "what a server says helps nobody"
    with pytest.raises(AuthenticationError):
        server.meet(b"nothing" * 5 + b"of it")


def test_first_bytes_are_for_one_listener_and_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overheard and said again elsewhere, or later, they are a stranger's."""
    hello = Handshake(SECRET, "a peer", b"29400", client=True).hello
    assert Handshake(SECRET, "a peer", b"29401", client=False).meet(hello) == b""
    server = Handshake(SECRET, "a peer", b"29400", client=False)
    now = time.time()
    for ago in (-handshake.FRESH - 2, handshake.FRESH + 2):
        monkeypatch.setattr(time, "time", lambda ago=ago: now + ago)
        assert server.meet(hello) == b""
    monkeypatch.setattr(time, "time", lambda: now + handshake.FRESH / 2)
    assert server.meet(hello)


def test_a_member_whose_clock_is_wrong_gets_in_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    server, now = Busy(0.0), time.time
    monkeypatch.setattr(handshake.time, "time", lambda: now() - (threading.get_ident() == own) * 86400)
    own = threading.get_ident()
    server.begin()
    try:
        Channel.connect(server.address, SECRET, ANYTHING, 30.0).close()
    finally:
        server.end()


FLOOD = """
import collections, socket, sys, time
host, _, port = sys.argv[1].rpartition(":")
held, made, began = collections.deque(), 0, 0.0
while True:
    try:
        held.append(socket.create_connection((host, int(port)), timeout=0.5))
        held[-1].sendall(bytes.fromhex(sys.argv[2]))
    except OSError:
        pass
    made += 1
    if len(held) > 6000:
        held.popleft().close()
    if made == 6000:
        print("flooded", flush=True)
        began = time.monotonic()
    elif made > 6000:
        time.sleep(max(0.0, began + (made - 6000) / 1000 - time.monotonic()))
"""
"""More than there is room for in a listener's queue, and then a thousand a second."""


STRANGER = Handshake(b"another secret", "", b"", client=True).hello


@pytest.mark.parametrize(
    "word", [b"", STRANGER[:20], STRANGER, bytes(1000)], ids=["", "part", "hello", "zeros"]
)
@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_a_flood_of_strangers_keeps_no_member_out(kind: str, word: bytes) -> None:
    """From the members' own address, whatever they say first."""
    if kind == "loop":
        server = Busy(0.0)
        server.begin()
        address, end = server.address, server.end
    else:
        transport = TcpTransport(ReplicaStore(), SECRET)
        address, end = transport.address, transport.close
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, address, word.hex()], stdout=subprocess.PIPE)
    try:
        assert flood.stdout is not None and flood.stdout.readline()
        for _ in range(10):
            Channel.connect(address, SECRET, ANYTHING, handshake.SECONDS).close()
    finally:
        flood.kill()
        flood.wait()
        end()


def test_members_get_in_where_many_repeat_what_they_have_overheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for, of what members have just said to a former server at this port."""
    monkeypatch.setattr(acceptor, "MAX_KNOWN", 64)
    monkeypatch.setattr(acceptor, "ANSWER", 0.2)
    monkeypatch.setattr(handshake, "PATIENCE", 3600.0)
    server = Busy(0.0)
    server.begin()
    overheard = []
    try:
        for _ in range(80):
            overheard.append(member_at(server.address)[1])
        for sock in overheard:
            sock.recv(Handshake.HELLO_BYTES, socket.MSG_WAITALL)
        Channel.connect(server.address, SECRET, ANYTHING, 60.0).close()
    finally:
        for sock in overheard:
            sock.close()
        server.end()


def test_the_workers_socket_is_for_its_own_user() -> None:
    """Any user of the machine can reach an abstract socket: another one's connection ends before a word."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    sock = listen(f"unix:\0ft-test-{os.getpid()}")
    server = Busy(0.0, sock)
    server.begin()
    code = (
        "import os, socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX); os.setuid(int(sys.argv[2]))\n"
        "sock.connect('\\0' + sys.argv[1])\n"
        "sock.sendall(bytes.fromhex(sys.argv[3]))\n"
        "try: print(len(sock.recv(100)))\n"
        "except ConnectionResetError: print(0)"
    )
    hello = Handshake(b"another secret", "", b"", client=True).hello.hex()
    try:
        told = []
        for user in (65534, 0):
            command = [sys.executable, "-c", code, f"ft-test-{os.getpid()}", str(user), hello]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            told.append(done.stdout.strip() or done.stderr)
        assert told == ["0", str(Handshake.HELLO_BYTES)]
    finally:
        server.end()


def test_members_have_more_time_than_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came first proves who it is after a stranger that came later was turned away for silence."""
    monkeypatch.setattr(handshake, "SECONDS", 2.0)
    monkeypatch.setattr(handshake, "PATIENCE", 3600.0)
    server = Busy(0.0)
    server.begin()
    try:
        hands, member = member_at(server.address)
        with member:
            proof = hands.answer(member.recv(hands.HELLO_BYTES, socket.MSG_WAITALL))
            with socket.create_connection(split_address(server.address)) as stranger:
                stranger.sendall(Handshake(b"another secret", "", b"", client=True).hello)
                while stranger.recv(100):  # a greeting, and then the end
                    pass
            member.sendall(proof)
            hands.confirm(member.recv(hands.PROOF_BYTES, socket.MSG_WAITALL))
    finally:
        server.end()

"""Handshake, frames and their enemies; blocking and asyncio ends talk to each other."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for_value

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import acceptor, handshake, sockets
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.channel import Channel
from ft_core.protocol.codec import MAX_BYTES, Decoder
from ft_core.protocol.connection import ROOM, Connection
from ft_core.protocol.sockets import join_address, listen, split_address

SECRET = b"s" * 32
ANYTHING = Decoder[dict[str, Any]](dict[str, Any])
HELLO = b"FTRN" + struct.pack("!I", handshake.VERSION)
"""Of this version; a nonce follows."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def address_of(listener: socket.socket) -> str:
    return join_address(*listener.getsockname()[:2])


class Middle:
    """A relay on the path which may change what the client sends."""

    def __init__(self, server: str, change: Callable[[bytes], bytes]) -> None:
        self._listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._wanted, self._server = change, server
        self._socks: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def arm(self) -> None:
        self.change = self._wanted

    def _run(self) -> None:
        client, _ = self._listener.accept()
        host, port = self._server.split(":")
        server = socket.create_connection((host, int(port)))
        self._socks += [client, server]
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)
        back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, changed: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(self.change(data) if changed else data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def pair(
    pool: ThreadPoolExecutor,
    secret: bytes = SECRET,
    through: list[Middle] | None = None,
    change: Callable[[bytes], bytes] | None = None,
) -> tuple[Channel, Channel]:
    listener = listen("127.0.0.1")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    accepted: Future[Channel] = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET, ANYTHING))
    if change is not None and through is not None:
        through.append(Middle(address, change))
        address = through[0].address
    try:
        client = Channel.connect(address, secret, ANYTHING, 60)
        return client, accepted.result()
    finally:
        listener.close()


def test_messages_and_payloads_arrive_as_sent(pool: ThreadPoolExecutor) -> None:
    client, server = pair(pool)
    data = os.urandom(3_000_001)
    sent = pool.submit(client.send, {"a": [1, "x"]}, memoryview(data))
    assert server.recv() == {"a": [1, "x"]}
    assert server.payload_bytes == len(data)
    got = bytearray(len(data))
    server.recv_payload_into(memoryview(got)[:1000])
    server.recv_payload_into(memoryview(got)[1000:])
    sent.result()
    assert got == data
    server.send({"b": None})
    assert client.recv() == {"b": None} and client.payload_bytes == 0
    server.send({}, b"abc")
    client.recv()
    with pytest.raises(ProtocolError, match="3 payload bytes"):
        client.recv()
    client.close()
    server.close()


def test_nothing_paces_what_stays_within_a_machine(pool: ThreadPoolExecutor) -> None:
    for channel in pair(pool):
        with socket.socket(fileno=os.dup(channel.fileno())) as sock:
            chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert chosen.rstrip(b"\0") == b"reno"
        channel.close()


def test_skipped_payload_leaves_the_next_message(pool: ThreadPoolExecutor) -> None:
    client, server = pair(pool)
    sent = pool.submit(client.send, {"n": 1}, bytes(2_500_000))
    assert server.recv() == {"n": 1}
    server.skip_payload()
    sent.result()
    client.send({"n": 2}, b"")
    assert server.recv() == {"n": 2}
    client.close()
    with pytest.raises(ConnectionError):
        server.recv()
    server.close()


def test_several_threads_may_send(pool: ThreadPoolExecutor) -> None:
    client, server = pair(pool)

    def send(k: int) -> None:
        for i in range(200):
            client.send({"k": k, "i": i})

    sends = [pool.submit(send, k) for k in range(3)]
    got = [server.recv() for _ in range(600)]
    for sent in sends:
        sent.result()
    for k in range(3):
        assert [m["i"] for m in got if m["k"] == k] == list(range(200))
    client.close()
    server.close()


def test_timeout_in_recv_loses_nothing(pool: ThreadPoolExecutor) -> None:
    listener = listen("127.0.0.1")
    raw: list[bytes] = []
    middle: list[Middle] = []

    def hold_back(data: bytes) -> bytes:
        raw.append(data)
        return data[:20]

    client, server = pair(pool, through=middle, change=hold_back)
    middle[0].arm()
    client.send({"late": True})
    wait_for_value(lambda: len(raw), 1)
    server.settimeout(0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            server.recv()
    middle[0].change = lambda data: raw[0][20:]
    client.send({})  # its bytes are replaced by the rest of the first frame
    server.settimeout(60)
    assert server.recv() == {"late": True}
    for end in (client, server, middle[0], listener):
        end.close()


def test_wrong_secret_at_the_client(pool: ThreadPoolExecutor) -> None:
    listener = listen("127.0.0.1")
    accepted = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET, ANYTHING))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(AuthenticationError, match=address + " refused"):
        Channel.connect(address, b"other", ANYTHING, 60)
    with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1:\d+ does not know this job's secret"):
        accepted.result()
    listener.close()


def test_server_that_does_not_know_the_secret(pool: ThreadPoolExecutor) -> None:
    listener = listen("127.0.0.1")

    def impostor() -> None:
        sock, _ = listener.accept()
        sock.sendall(HELLO + bytes(32))
        sock.recv(72, socket.MSG_WAITALL)
        sock.sendall(b"\1" * 32)  # accepts everybody, but cannot prove itself
        sock.recv(1)
        sock.close()

    fake = pool.submit(impostor)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(AuthenticationError, match=address + " does not know"):
        Channel.connect(address, SECRET, ANYTHING, 60)
    fake.result()
    listener.close()


def test_stranger_costs_nothing(pool: ThreadPoolExecutor) -> None:
    """Whatever a stranger sends first, 40 bytes of it are read, and the connection is closed."""
    listener = listen("127.0.0.1")
    oversized = struct.pack("!4sIQ32s", b"FTW1", 0xFFFFFFFF, 1 << 60, bytes(32))[:40]
    for data in (oversized, b"GET / HTTP/1.1\r\nHost: x\r\n".ljust(40, b" "), HELLO):
        accepted = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET, ANYTHING))
        with socket.create_connection(listener.getsockname()) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while part := sock.recv(4096):
                answer += part
            assert len(answer) == 40
        with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1"):
            accepted.result()
    accepted = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET, ANYTHING, 0.05))
    silent = socket.create_connection(listener.getsockname())
    with pytest.raises(AuthenticationError, match="did not finish"):
        accepted.result()
    silent.close()
    listener.close()


@pytest.mark.parametrize("position", [5, 14, 30, 52], ids=["json length", "payload length", "mac", "json"])
def test_tampered_frame(pool: ThreadPoolExecutor, position: int) -> None:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position] ^= 1
        return bytes(changed)

    middle: list[Middle] = []
    client, server = pair(pool, through=middle, change=flip)
    middle[0].arm()
    client.send({"pay": "me"}, b"1234")
    client.close()  # a changed length makes the server wait for bytes that never come
    with pytest.raises((AuthenticationError, ProtocolError, ConnectionError)):
        server.recv()
    assert server.fileno() == -1
    middle[0].close()


def test_repeated_frame_is_refused(pool: ThreadPoolExecutor) -> None:
    middle: list[Middle] = []
    client, server = pair(pool, through=middle, change=lambda data: data * 2)
    middle[0].arm()
    client.send({"pay": 1})
    assert server.recv() == {"pay": 1}
    with pytest.raises(AuthenticationError, match="altered"):
        server.recv()
    client.close()
    middle[0].close()


def test_oversized_json_is_refused_before_it_is_read(pool: ThreadPoolExecutor) -> None:
    def grow(data: bytes) -> bytes:
        return data[:4] + struct.pack("!I", MAX_BYTES + 1) + data[8:]

    middle: list[Middle] = []
    client, server = pair(pool, through=middle, change=grow)
    middle[0].arm()
    client.send({})
    with pytest.raises(ProtocolError, match="limit"):
        server.recv()
    with pytest.raises(ProtocolError, match="limit"):
        client.send({"x": "y" * MAX_BYTES})
    client.close()
    middle[0].close()


def test_truncated_frame(pool: ThreadPoolExecutor) -> None:
    middle: list[Middle] = []
    client, server = pair(pool, through=middle, change=lambda data: data[:-3])
    middle[0].arm()
    client.send({"whole": False})
    client.close()
    with pytest.raises(ConnectionError):
        server.recv()
    middle[0].close()


def test_abort_wakes_a_blocked_thread(pool: ThreadPoolExecutor) -> None:
    client, server = pair(pool)
    blocked = pool.submit(server.recv)
    server.abort()
    with pytest.raises(ConnectionError):
        blocked.result()
    server.close()
    with pytest.raises(ConnectionError):
        server.recv()
    client.close()


def test_send_to_a_peer_that_takes_nothing_times_out(pool: ThreadPoolExecutor) -> None:
    client, server = pair(pool)
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.send({}, bytes(64 << 20))
    with pytest.raises(ConnectionError):  # half a frame is out
        client.send({})
    server.close()


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_blocking_client_and_asyncio_server(tmp_path: Path, family: str) -> None:
    async def serve() -> None:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def connected(connection: Connection) -> None:
            channel = await AsyncChannel.accept(connection, SECRET, ANYTHING)
            for _ in range(3):
                channel.post({"echo": await channel.recv()})
            with pytest.raises(ProtocolError, match="payload"):
                await channel.recv()
            done.set_result(channel.peer)

        sock = listen(f"unix:{tmp_path / 's'}" if family == "unix" else "127.0.0.1")
        address = f"unix:{tmp_path / 's'}" if family == "unix" else address_of(sock)
        server = asyncio.create_task(acceptor.serve(sock, SECRET, "a test", connected))

        def talk() -> None:
            channel = Channel.connect(address, SECRET, ANYTHING, 60)
            for i in range(3):
                channel.send({"i": i})
                assert channel.recv() == {"echo": {"i": i}}
            with pytest.raises(ConnectionError):  # closed once the header is there
                channel.send({}, b"payload")
                channel.recv()
            channel.close()

        await asyncio.to_thread(talk)
        assert (await done).startswith("127.0.0.1:" if family == "tcp" else "unix:/")
        server.cancel()

    asyncio.run(serve())


def test_asyncio_client_and_blocking_server(pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        listener = listen("127.0.0.1")
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            channel = Channel.accept(listener.accept()[0], SECRET, ANYTHING)
            channel.send({"got": channel.recv()})
            channel.close()

        served = pool.submit(serve)
        channel = await AsyncChannel.connect(address, SECRET, ANYTHING)
        waiting = asyncio.create_task(channel.recv())
        await asyncio.sleep(0)
        waiting.cancel()  # a cancelled recv takes nothing away
        await asyncio.gather(waiting, return_exceptions=True)
        await channel.send({"x": 1})
        assert await channel.recv() == {"got": {"x": 1}}
        with pytest.raises(ConnectionError):
            await channel.recv()
        with pytest.raises(ConnectionError):
            channel.post({})
        served.result()
        accepted = pool.submit(lambda: Channel.accept(listener.accept()[0], SECRET, ANYTHING))
        with pytest.raises(AuthenticationError, match="refused"):
            await AsyncChannel.connect(address, b"other", ANYTHING)
        with pytest.raises(AuthenticationError):
            accepted.result()
        listener.close()

    asyncio.run(main())


async def both_ends(through: Callable[[str], str] = str) -> tuple[AsyncChannel, AsyncChannel, Connection]:
    """Client, server, and the server's connection; `through` changes the address that is connected to."""
    taken: asyncio.Future[tuple[AsyncChannel, Connection]] = asyncio.get_running_loop().create_future()

    async def connected(connection: Connection) -> None:
        taken.set_result((await AsyncChannel.accept(connection, SECRET, ANYTHING), connection))

    server = asyncio.create_task(acceptor.serve(listener := listen("127.0.0.1"), SECRET, "a test", connected))
    client = await AsyncChannel.connect(through(address_of(listener)), SECRET, ANYTHING)
    accepted, connection = await taken
    server.cancel()
    return client, accepted, connection


def test_frames_are_found_however_they_are_cut() -> None:
    async def main() -> None:
        client, server, connection = await both_ends()
        frames = [client._frames.pack(f'{{"n":{n},"x":"{"x" * n}"}}'.encode()) for n in range(40)]
        whole, sizes = b"".join(frames), [1, 2, 47, 48, 49, 300, 5]
        heard: list[int] = []
        each = asyncio.create_task(server.each(lambda message: heard.append(message["n"])))
        await asyncio.sleep(0)
        while whole:
            size = sizes[len(whole) % len(sizes)]
            connection.data_received(whole[:size])
            whole = whole[size:]
        assert heard == list(range(40))
        client.close()
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            await each

    asyncio.run(main())


def test_a_connection_that_has_just_been_reset_is_left_without_an_error() -> None:
    """Whether the event loop knows of it already or not."""

    async def main() -> None:
        client, server, connection = await both_ends()
        transport = client._connection.transport
        now = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        transport.abort()
        await asyncio.sleep(0)
        assert transport.get_extra_info("socket").fileno() < 0 and not server.closing
        server.say_no_more()
        with pytest.raises(ConnectionResetError):
            await server.recv()
        while connection.transport.get_extra_info("socket").fileno() >= 0:
            await asyncio.sleep(0.01)
        server.ends_first()
        assert connection._last is None

    asyncio.run(main())


def test_who_is_not_read_from_keeps_what_he_sends() -> None:
    """And who reads again has all of it."""

    async def main() -> None:
        client, server, connection = await both_ends()
        client.post({"x": "x" * (8 << 20)})
        for n in range(2000):
            client.post({"n": n, "x": "x" * 10_000})
        first = await server.recv()
        assert len(first["x"]) == 8 << 20
        for _ in range(200):
            await asyncio.sleep(0.001)
            assert len(connection.buffer) <= ROOM + (256 << 10)
        assert [(await server.recv())["n"] for _ in range(2000)] == list(range(2000))
        client.close()
        server.close()

    asyncio.run(main())


def test_a_recv_that_is_cancelled_in_the_middle_of_a_frame_takes_nothing_away() -> None:
    async def main() -> None:
        client, server, connection = await both_ends()
        frame = client._frames.pack(b'{"n":1}')
        for end in (10, 48, 50, len(frame)):
            waiting = asyncio.create_task(server.recv())
            await asyncio.sleep(0)
            connection.data_received(frame[len(connection.buffer) : end])
            if end < len(frame):
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        assert await waiting == {"n": 1}
        client.close()
        server.close()

    asyncio.run(main())


def test_what_a_handler_of_messages_raises_ends_the_reading() -> None:
    async def main() -> None:
        client, server, connection = await both_ends()
        heard: list[int] = []

        def handle(message: dict[str, Any]) -> None:
            heard.append(message["n"])
            if message["n"] == 2:
                raise ConnectionRefusedError("its own")

        client.post({"n": 1})
        client.post({"n": 2})
        client.post({"n": 3})
        with pytest.raises(ConnectionRefusedError, match="its own"):
            await server.each(handle)
        assert heard == [1, 2] and await server.recv() == {"n": 3}
        connection.data_received(b"no frame".ljust(100))
        with pytest.raises(ProtocolError, match="not a frame"):
            await server.each(handle)
        with pytest.raises(ConnectionError):
            server.post({})
        client.close()

    asyncio.run(main())


def test_a_connection_to_a_peer_that_acknowledges_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a partition; here the peer's kernel has no room for what comes."""
    monkeypatch.setattr(sockets, "GONE_MS", 500)

    async def main() -> None:
        taken: asyncio.Future[AsyncChannel] = asyncio.get_running_loop().create_future()

        async def connected(connection: Connection) -> None:
            taken.set_result(await AsyncChannel.accept(connection, SECRET, ANYTHING))
            connection.transport.pause_reading()

        server = asyncio.create_task(
            acceptor.serve(listener := listen("127.0.0.1"), SECRET, "a test", connected)
        )
        channel = await AsyncChannel.connect(address_of(listener), SECRET, ANYTHING)
        await taken
        channel.post({"x": "x" * (MAX_BYTES // 2)})
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionError):
                await channel.recv()
        channel.close()
        taken.result().close()
        server.cancel()

    asyncio.run(main())


def test_asyncio_server_refuses_strangers() -> None:
    async def main() -> None:
        refused: asyncio.Queue[str] = asyncio.Queue()

        async def connected(connection: Connection) -> None:
            try:
                await AsyncChannel.accept(connection, SECRET, ANYTHING)
            except AuthenticationError as error:
                refused.put_nowait(str(error))

        server = asyncio.create_task(
            acceptor.serve(listener := listen("127.0.0.1"), SECRET, "a test", connected)
        )
        address = address_of(listener)
        with pytest.raises(AuthenticationError, match="refused"):
            await asyncio.to_thread(Channel.connect, address, b"other", ANYTHING, 60)
        assert "does not know" in await refused.get()
        _, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[1]))
        writer.write(handshake.Handshake(b"other", "", b"", client=True).hello)
        writer.close()
        assert "did not finish" in await refused.get()
        server.cancel()

    asyncio.run(main())


OLDER = b"FTRN" + struct.pack("!I", 1) + bytes(32)


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_client_of_another_version_is_refused_before_it_says_anything(
    pool: ThreadPoolExecutor, kind: str
) -> None:
    """It has sent its version, not its proof; and it is told this one's, so it can say the same."""
    found: list[str] = []

    async def serve() -> None:
        taken = asyncio.Event()

        async def connected(connection: Connection) -> None:
            with pytest.raises(AuthenticationError) as caught:
                await AsyncChannel.accept(connection, SECRET, ANYTHING)
            found.append(str(caught.value))
            taken.set()

        server = asyncio.create_task(acceptor.serve(listener, SECRET, "a test", connected))
        await taken.wait()
        server.cancel()

    def accept() -> None:
        with pytest.raises(AuthenticationError) as caught:
            Channel.accept(listener.accept()[0], SECRET, ANYTHING)
        found.append(str(caught.value))

    listener = listen("127.0.0.1")
    where = listener.getsockname()
    served = pool.submit(accept) if kind == "thread" else pool.submit(asyncio.run, serve())
    with socket.create_connection(where) as sock:
        sock.sendall(OLDER)
        hello = sock.recv(100, socket.MSG_WAITALL)  # to the end
    served.result()
    assert hello.startswith(HELLO) and len(hello) == 40
    mine = f"this process version {handshake.VERSION}: "
    assert re.match(rf"127\.0\.0\.1:\d+ speaks version 1 .* {mine}.* same release", found[0])
    listener.close()


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_server_of_another_version_is_not_talked_to(pool: ThreadPoolExecutor, kind: str) -> None:
    listener = listen("127.0.0.1")
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def serve() -> bytes:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(OLDER)
            return sock.recv(200, socket.MSG_WAITALL)

    served = pool.submit(serve)
    with pytest.raises(
        AuthenticationError, match=f"{address} speaks version 1 .* this process version {handshake.VERSION}: "
    ):
        if kind == "thread":
            Channel.connect(address, SECRET, ANYTHING, 60)
        else:
            asyncio.run(AsyncChannel.connect(address, SECRET, ANYTHING))
    assert served.result().startswith(HELLO) and len(served.result()) == 40, "the version, and no proof"
    listener.close()


def test_empty_secret_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with pytest.raises(ValueError, match="secret"):
        Channel.accept(ours, b"", ANYTHING)
    theirs.close()


_HOLDER = """
import asyncio, os, socket, sys, time
from ft_core.net.transport import TcpTransport
from ft_core.process.descriptors import raise_limit
from ft_core.protocol.connection import Connection
from ft_core.state.store import NodeStore

async def main():
    raise_limit()
    loop = asyncio.get_running_loop()
    transport = TcpTransport(NodeStore(), b"secret")
    _, connection = await loop.create_connection(Connection, *sys.argv[1].rsplit(":", 1))
    memory = os.memfd_create("memory")
    for _ in range(64):
        os.write(memory, bytes(4 << 20))
    os.dup2(int(sys.argv[2]), 300)
    os.close(int(sys.argv[2]))
    connection.ends_first()
    connection.write(transport.address.encode() + b" ")
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_the_peer_of_one_that_is_killed_hears_of_it_before_its_memory_is_freed():
    """The kernel closes its files from the last: a pipe, its memory files, its connection, were it not for
    the connection's second number, beyond all others; what others would connect to has a higher one yet."""
    pipe, other = os.pipe()
    with listen("127.0.0.1") as listener:
        command = [sys.executable, "-c", _HOLDER, address_of(listener), str(other)]
        with subprocess.Popen(command, pass_fds=(other,)) as holder:
            os.close(other)
            accepted, _ = listener.accept()
            with accepted:
                address = b""
                while not address.endswith(b" "):
                    address += accepted.recv(100)
                assert accepted in select.select([accepted, pipe], [], [])[0]
                assert accepted.recv(1) == b""
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(split_address(address.decode().strip()))
    assert holder.returncode == -signal.SIGKILL
    os.close(pipe)

"""Push and fetch between real processes, which also die, stop, lie and lose bits."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from core.copies import fetch, make, push, sums
from harness import environment
from waiting import wait_for_value

from ft_core.errors import CorruptSnapshot, ProtocolError, TransportError
from ft_core.net import transport as net
from ft_core.net.transport import TcpTransport
from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import AskProgress, AskStartupEntries, StartupEntries
from ft_core.protocol.sockets import listen
from ft_core.protocol.transfers import (
    ANSWER,
    REQUEST,
    RUN,
    Accepted,
    Answer,
    Chunks,
    CommitPush,
    Failed,
    Found,
    PushBegun,
    Question,
    StrikeCopy,
)
from ft_core.state.manifest import CHUNK, Item, Segment
from ft_core.state.replicas import ReplicaStore

PEER = Path(__file__).with_name("transport_peer.py")
SECRET = b"transport test secret"


class Peer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.address = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer() -> Iterator[Peer]:
    other = Peer()
    yield other
    other.close()


@pytest.fixture(params=[4, 64], ids=["striped", "alone"])
def mine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpTransport]:
    monkeypatch.setattr(net, "_PUSHED_ALONE", request.param)
    transport = TcpTransport(ReplicaStore(), SECRET)
    yield transport
    transport.close()


def test_round_trip_of_several_sizes(mine: TcpTransport, peer: Peer) -> None:
    sizes = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK, 5 * CHUNK, 9 * CHUNK + 12345]
    copies = [make(size, role) for role, size in enumerate(sizes)]
    for copy, size in zip(copies, sizes, strict=True):
        assert push(mine, peer.address, copy) == size
    assert mine.sent_bytes == sum(sizes)
    for segment, data, checksums in copies:
        assert fetch(mine, peer.address, segment.id) == (segment, checksums, bytearray(data))
    assert mine.received_bytes == sum(sizes)
    assert peer.ask("counts") == {"sent": 0, "received": sum(sizes)}


def test_a_held_copy_is_not_sent_again(mine: TcpTransport, peer: Peer) -> None:
    segment, data, checksums = make(5 * CHUNK + 7)
    assert push(mine, peer.address, (segment, data, checksums)) == segment.nbytes
    assert push(mine, peer.address, (segment, data, checksums)) == 0
    assert push(mine, peer.address, (segment, data, checksums), version=2) == segment.nbytes
    data[-1] ^= 1
    assert push(mine, peer.address, (segment, data, sums(data)), version=2) == 7
    assert mine.sent_bytes == 2 * segment.nbytes + 7
    assert peer.ask("versions") == {segment.id: [2]}  # the later word on version 2, once
    assert fetch(mine, peer.address, segment.id, 2)[2] == data


def test_chunks_of_an_older_copy_are_not_sent_again(mine: TcpTransport, peer: Peer) -> None:
    segment, data, _ = make(9 * CHUNK + 7)
    sizes = []
    for version, changed in enumerate([(), (), (), (0,), (3, 4, 9), (9,), range(10)]):
        for index in changed:
            data[index * CHUNK] ^= 1 + version
        sizes.append(push(mine, peer.address, (segment, data, sums(data)), version=version))
        assert fetch(mine, peer.address, segment.id, version)[2] == data
    whole = segment.nbytes
    # What is overwritten is the copy before the last, which was read: a reader keeps that memory.
    assert sizes == [whole] * 7
    for version, changed in enumerate([(), (), (0,), (3, 4, 9), (9,), range(10)], 7):
        for index in changed:
            data[index * CHUNK] ^= 1 + version
        sizes.append(push(mine, peer.address, (segment, data, sums(data)), version=version))
    assert sizes[7:] == [whole, whole, CHUNK, 3 * CHUNK + 7, 2 * CHUNK + 7, whole]
    assert fetch(mine, peer.address, segment.id, 12)[2] == data
    assert mine.sent_bytes == sum(sizes)


@pytest.mark.parametrize("missing", [[(1, 0)], [(0, 3)], [(1, 2), (0, 1)], [(0, 0)]])
def test_who_misses_chunks_that_are_not_there_is_refused(missing: list[tuple[int, int]]) -> None:
    with pytest.raises(ProtocolError, match="it misses"):
        net._messages(missing, make(2 * CHUNK)[0])


def test_gate_is_called_before_each_message(mine: TcpTransport, peer: Peer) -> None:
    passed: list[int] = []
    push(mine, peer.address, make((3 * RUN - 1) * CHUNK + 1), gate=lambda: passed.append(mine.sent_bytes))
    assert len(passed) == 3 and min(passed) == 0


def test_pushes_in_parallel(mine: TcpTransport, peer: Peer) -> None:
    copies = [make(6 * CHUNK + role, role) for role in range(4)]
    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda copy: push(mine, peer.address, copy), copies))
    assert sizes == [segment.nbytes for segment, _, _ in copies]
    for segment, data, _ in copies:
        assert fetch(mine, peer.address, segment.id)[2] == data


def test_killed_receiver(mine: TcpTransport, peer: Peer) -> None:
    copy = make(16 * CHUNK)

    def kill_late() -> None:
        if mine.sent_bytes >= 6 * CHUNK:
            peer.process.kill()
            peer.process.wait()

    with pytest.raises(TransportError, match=f"pushing segment {copy[0].id}.*version 1.*{peer.address}"):
        push(mine, peer.address, copy, gate=kill_late)
    with pytest.raises(TransportError, match="refused"):
        push(mine, peer.address, copy)


def test_stopped_receiver_hits_the_deadline(mine: TcpTransport, peer: Peer) -> None:
    stopped = threading.Event()

    def stop() -> None:
        if not stopped.is_set() and mine.sent_bytes >= 4 * CHUNK:
            stopped.set()
            peer.process.send_signal(signal.SIGSTOP)

    with pytest.raises(TransportError, match=r"in time|deadline"):
        push(mine, peer.address, make(64 * CHUNK), gate=stop, deadline=1)
    peer.process.send_signal(signal.SIGSTOP)  # where it took a second to come so far
    with pytest.raises(TransportError):
        mine.request(peer.address, StrikeCopy("x", 1), 0.2)
    peer.process.send_signal(signal.SIGCONT)
    assert peer.ask("versions") == {}


def test_stopped_holder_hits_the_deadline_of_a_fetch(mine: TcpTransport, peer: Peer) -> None:
    segment, data, checksums = make(64 * CHUNK)
    push(mine, peer.address, (segment, data, checksums))

    def stop(segment: Segment) -> memoryview:
        peer.process.send_signal(signal.SIGSTOP)
        return memoryview(bytearray(segment.nbytes))

    with pytest.raises(TransportError, match="fetching segment"):
        mine.fetch(peer.address, segment.id, 1, allocate=stop, deadline=0.5)
    peer.process.send_signal(signal.SIGCONT)
    assert fetch(mine, peer.address, segment.id)[2] == data


def test_torn_push_keeps_the_older_copies(mine: TcpTransport, peer: Peer) -> None:
    segment, first, checksums = make(8 * RUN * CHUNK)
    push(mine, peer.address, (segment, first, checksums), version=1)
    _, second, others = make(8 * RUN * CHUNK)

    class TornError(Exception):
        pass

    def tear() -> None:
        if mine.sent_bytes >= 12 * RUN * CHUNK:
            raise TornError

    for version in (2, 3):
        with pytest.raises(TornError):
            push(mine, peer.address, (segment, second, others), version=version, gate=tear)
    assert peer.ask("versions") == {segment.id: [1]}
    assert fetch(mine, peer.address, segment.id)[2] == first
    assert push(mine, peer.address, (segment, second, others), version=3) == segment.nbytes
    assert peer.ask("versions") == {segment.id: [1, 3]}


def test_killed_between_the_last_chunk_and_the_commit(mine: TcpTransport, peer: Peer) -> None:
    peer.ask("hold")
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(push, mine, peer.address, make(5 * CHUNK))
        assert peer.line() == "at commit"
        peer.process.kill()
        with pytest.raises(TransportError):
            pushed.result()


def test_flipped_bit_in_a_replica_is_found(mine: TcpTransport, peer: Peer) -> None:
    segment, data, checksums = make(7 * CHUNK)
    for version in (1, 2):
        push(mine, peer.address, (segment, data, checksums), version=version)
    peer.ask("flip", segment.id, 2, 5 * CHUNK + 3)
    with pytest.raises(
        CorruptSnapshot, match=rf"{segment.id}.*version 2: chunk 5 .*held by agent {peer.address}"
    ):
        fetch(mine, peer.address, segment.id, 2)
    assert fetch(mine, peer.address, segment.id, 1)[2] == data


def test_data_that_changed_since_its_checksums(mine: TcpTransport, peer: Peer) -> None:
    segment, data, checksums = make(4 * CHUNK)  # by one connection: another would be stopped in the middle
    data[3 * CHUNK] ^= 1
    with pytest.raises(CorruptSnapshot) as caught:
        push(mine, peer.address, (segment, data, checksums))
    for part in (segment.id, "version 1", "chunk 3", "role 0", peer.address, mine.address):
        assert part in str(caught.value)
    assert mine.sent_bytes == 5 * CHUNK  # the chunk was sent twice
    assert peer.ask("versions") == {}


class FlippingRelay:
    """Flips one bit of the payload that passes towards the server, once."""

    def __init__(self, server: str, after: int) -> None:
        self.server, self.left = server, after
        self.listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.socks = [self.listener]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            host, port = self.server.split(":")
            server = socket.create_connection((host, int(port)))
            self.socks += [client, server]
            threading.Thread(target=self.pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self.pump, args=(server, client, False), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket, flip: bool) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if flip and self.left >= 0:
                    self.left -= len(data)
                    if self.left < 0:
                        data[len(data) // 2] ^= 1
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for sock in self.socks:
            sock.close()


def test_bit_lost_on_the_way_is_sent_again(mine: TcpTransport, peer: Peer) -> None:
    segment, data, checksums = make(2 * CHUNK)
    relay = FlippingRelay(peer.address, CHUNK // 2)  # well inside the first chunk's payload
    assert push(mine, relay.address, (segment, data, checksums)) == segment.nbytes
    assert mine.sent_bytes == 3 * CHUNK
    assert fetch(mine, peer.address, segment.id)[2] == data
    mine.close_peers()
    relay.close()


def test_missing_copy(mine: TcpTransport, peer: Peer) -> None:
    segment, data, checksums = make(100)
    push(mine, peer.address, (segment, data, checksums))
    for name, version in ((segment.id, 2), ("nobody", 1)):
        with pytest.raises(TransportError, match=f"no valid copy of segment {name} version {version}"):
            fetch(mine, peer.address, name, version)


def test_stale_epoch_is_refused(mine: TcpTransport, peer: Peer) -> None:
    peer.ask("epoch", 3)
    with pytest.raises(TransportError, match=r"stale sender.*epoch 2.*epoch 3"):
        push(mine, peer.address, make(100), epoch=2)
    assert push(mine, peer.address, make(100), epoch=3) == 100


def test_close_peers_wakes_a_blocked_push(mine: TcpTransport, peer: Peer) -> None:
    copy = make(64 * CHUNK)
    reached = threading.Event()

    def gate() -> None:
        if mine.sent_bytes >= 4 * CHUNK and not reached.is_set():
            peer.process.send_signal(signal.SIGSTOP)
            reached.set()

    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(push, mine, peer.address, copy, deadline=60, gate=gate)
        reached.wait()
        mine.close_peers()
        with pytest.raises(TransportError, match="dropped its connections"):
            pushed.result(timeout=30)
    peer.process.send_signal(signal.SIGCONT)
    assert push(mine, peer.address, copy) == copy[0].nbytes  # connections are made anew


def test_close_peers_of_one_agent_leaves_the_others_alone(mine: TcpTransport, peer: Peer) -> None:
    copy, reached, go_on = make(64 * CHUNK), threading.Event(), threading.Event()

    def gate() -> None:
        if mine.sent_bytes >= 4 * CHUNK:
            reached.set()
            go_on.wait(30)

    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(push, mine, peer.address, copy, deadline=60, gate=gate)
        reached.wait()
        mine.close_peers("127.0.0.1:1")
        go_on.set()
        assert pushed.result(timeout=30) == copy[0].nbytes
        mine.close_peers(peer.address)
        reached.clear(), go_on.clear()
        pushed = pool.submit(push, mine, peer.address, copy, version=2, deadline=60, gate=gate)
        reached.wait()
        mine.close_peers(peer.address)
        go_on.set()
        with pytest.raises(TransportError, match="dropped its connections"):
            pushed.result(timeout=30)


def test_new_sender_takes_over_from_a_stuck_one(mine: TcpTransport, peer: Peer) -> None:
    copy = make(8 * RUN * CHUNK)
    stuck, go_on = threading.Event(), threading.Event()

    def gate() -> None:
        if mine.sent_bytes >= 5 * RUN * CHUNK:
            stuck.set()
            go_on.wait()

    other = TcpTransport(ReplicaStore(), SECRET)
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(push, mine, peer.address, copy, gate=gate, epoch=4)
        stuck.wait()
        with pytest.raises(TransportError, match="stale sender"):
            push(other, peer.address, copy, epoch=3)
        assert push(other, peer.address, copy, epoch=5) == copy[0].nbytes
        go_on.set()
        with pytest.raises(TransportError):
            pushed.result()
    assert fetch(other, peer.address, copy[0].id)[2] == copy[1]
    other.close()


def test_connections_are_reused_and_rebuilt(mine: TcpTransport) -> None:
    store = ReplicaStore()
    server = TcpTransport(store, SECRET, answer=entries)
    port = int(server.address.rsplit(":", 1)[1])
    for i in range(20):
        assert mine.request(server.address, AskStartupEntries(1, 0, f"0-1:1#{i}", 0), 60) == StartupEntries(
            1, {f"0-1:1#{i}": []}
        )
    with server._server._lock:  # whoever has started the thread may not have noted it yet
        assert len(server._server._threads) == 1
    server.close()
    with pytest.raises(TransportError):
        mine.request(server.address, AskStartupEntries(1, 0, "0-1:1#0", 0), 60)
    echo = listen("127.0.0.1", port)  # another process on the same port, as after a restart
    with ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            channel = Channel.accept(echo.accept()[0], SECRET, REQUEST)
            channel.recv()
            channel.send(Accepted())
            channel.close()

        served = pool.submit(serve)
        assert mine.request(server.address, AskStartupEntries(1, 0, "0-1:1#0", 0), 60) == Accepted()
        served.result()
    echo.close()


def test_error_of_an_answer_reaches_the_asker(mine: TcpTransport, peer: Peer) -> None:
    with pytest.raises(TransportError, match="no such thing"):
        mine.request(peer.address, AskProgress(1, 0), 60)
    assert peer.ask("versions") == {}
    with pytest.raises(TransportError, match="answers no questions"):
        mine.request(mine.address, AskProgress(1, 0), 60)


def entries(question: Question) -> Found:
    assert isinstance(question, AskStartupEntries)
    return StartupEntries(question.id, {question.group: []})


def row(*items: tuple[int, int], holders: tuple[Any, ...] = (0,)) -> dict[str, Any]:
    made = tuple(Item(f"i{k}", "uint8", (n,), o, n) for k, (o, n) in enumerate(items))
    return {"holders": ",".join(map(str, holders)), "items": Segment((0,), made).to_json()["items"]}


GOOD = {
    "type": "PushSegment",
    "segment": row((0, 10)),
    "version": 1,
    "epoch": 0,
    "checksums": [1],
    "seconds": 5.0,
}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "Exec"},
        {"type": ["PushSegment"]},
        {"type": "PushSegment"},
        GOOD | {"more": 1},
        GOOD | {"segment": []},
        GOOD | {"segment": {"holders": "0", "items": [["a"]]}},
        GOOD | {"segment": {"holders": "0", "items": 7}},
        GOOD | {"segment": row((0, 10), holders=())},
        GOOD | {"segment": row((0, 10), holders=(1, 1))},
        GOOD | {"segment": row((0, 10), holders=(-1,))},
        GOOD | {"segment": row((0, 10), holders=("0-9999999:1",))},
        GOOD | {"segment": row((0, 10), (9, 10))},
        GOOD | {"segment": row((-64, 10))},
        GOOD | {"segment": row((0, -1))},
        GOOD | {"segment": row((1 << 50, 10))},
        GOOD | {"segment": {"holders": "0", "items": [["a", "f", [1], 1.5, 4]]}},
        GOOD | {"checksums": []},
        GOOD | {"checksums": ["1"]},
        GOOD | {"checksums": [-1]},
        GOOD | {"checksums": [1 << 64]},
        GOOD | {"version": -1},
        GOOD | {"version": True},
        GOOD | {"epoch": None},
        GOOD | {"seconds": float("nan")},
        GOOD | {"seconds": -1.0},
        GOOD | {"seconds": "1"},
        {"type": "CommitPush"},
        {"type": "FetchSegment", "segment": 1, "version": 1, "seconds": 5.0},
        {"type": "DescribeSegment", "segment": "a", "version": "1"},
    ],
    ids=repr,
)
def test_nonsense_is_answered_and_the_server_lives(mine: TcpTransport, message: dict[str, Any]) -> None:
    channel = Channel.connect(mine.address, SECRET, ANSWER, 60)
    channel.settimeout(60)
    channel.send(message)  # type: ignore[arg-type]
    reply = channel.recv()
    assert isinstance(reply, Failed) and reply.error and not reply.corrupt
    with pytest.raises(ConnectionError):
        channel.recv()
    channel.close()
    with pytest.raises(TransportError, match="answers no questions"):
        mine.request(mine.address, AskProgress(1, 0), 60)


@pytest.fixture
def pushing(mine: TcpTransport) -> Iterator[tuple[Channel[Answer], str]]:
    """A connection on which a push has begun, and its token."""
    channel = Channel.connect(mine.address, SECRET, ANSWER, 60)
    channel.settimeout(60)
    channel.send(GOOD)  # type: ignore[arg-type]
    begun = channel.recv()
    assert isinstance(begun, PushBegun)
    yield channel, begun.token
    channel.close()


@pytest.mark.parametrize(("index", "size"), [(0, 9), (0, 11), (1, 10), (-1, 10), (None, 10)], ids=repr)
def test_chunk_that_does_not_fit_is_refused(
    pushing: tuple[Channel[Answer], str], index: int | None, size: int
) -> None:
    channel, token = pushing
    channel.send({"type": "Chunks", "token": token, "first": index}, bytes(size))  # type: ignore[arg-type]
    reply = channel.recv()
    assert isinstance(reply, Failed) and re.search("chunk|first", reply.error)


def test_commit_needs_every_chunk_verified(pushing: tuple[Channel[Answer], str]) -> None:
    channel, token = pushing
    channel.send(Chunks(token, 0), bytes(10))  # not what the checksum says
    channel.send(CommitPush(token))
    reply = channel.recv()
    assert isinstance(reply, Failed) and "1 chunks missing" in reply.error


def test_segment_over_the_limit_is_refused(mine: TcpTransport) -> None:
    small = TcpTransport(ReplicaStore(), SECRET, max_segment_bytes=1000)
    with pytest.raises(TransportError, match="over the limit of 1000"):
        push(mine, small.address, make(1001))
    assert push(mine, small.address, make(1000)) == 1000
    small.close()


def test_wrong_secret(mine: TcpTransport) -> None:
    stranger = TcpTransport(ReplicaStore(), b"another job")
    with pytest.raises(TransportError, match="secret"):
        push(stranger, mine.address, make(10))
    stranger.close()


def test_arguments_that_do_not_belong_together(mine: TcpTransport) -> None:
    segment, data, checksums = make(100)
    for wrong in ((segment, data[:99], checksums), (segment, data, [*checksums, 1])):
        with pytest.raises(ValueError, match="100 bytes and 1 chunks"):
            push(mine, mine.address, wrong)


def test_close_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    one, two = TcpTransport(ReplicaStore(), SECRET), TcpTransport(ReplicaStore(), SECRET)
    push(one, two.address, make(6 * CHUNK))
    push(two, one.address, make(6 * CHUNK))
    one.close()
    two.close()
    wait_for_value(lambda: set(threading.enumerate()) <= before, True)


class Stuck(FlippingRelay):
    """An interface of a peer through which nothing comes or goes once it is stuck, or little while it is
    slow; it takes connections all the same."""

    def __init__(self, server: str) -> None:
        self.stuck, self.slow, self.over = threading.Event(), threading.Event(), threading.Event()
        super().__init__(server, 0)

    def pump(self, source: socket.socket, sink: socket.socket, flip: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                while self.stuck.is_set() and not self.over.is_set():
                    self.over.wait(0.05)
                if self.slow.is_set() and len(data) == 1 << 16:
                    self.over.wait(0.02)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self.over.set()
        super().close()
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            socket.create_connection(("127.0.0.1", int(self.address.split(":")[1])), timeout=1).close()


def test_all_interfaces_of_a_peer_are_used() -> None:
    other = TcpTransport(ReplicaStore(), SECRET, host=["127.0.0.1", "127.0.0.2"])
    mine = TcpTransport(ReplicaStore(), SECRET)
    assert [way.split(":")[0] for way in other.address.split(",")] == ["127.0.0.1", "127.0.0.2"]
    copy = make(70 * CHUNK + 5)
    assert push(mine, other.address, copy) == copy[0].nbytes
    assert fetch(mine, other.address, copy[0].id) == (copy[0], copy[2], bytearray(copy[1]))
    assert {way for way, idle in mine._peers._idle.items() if idle} == set(other.address.split(","))
    mine.close_peers(other.address)
    assert not mine._peers._idle
    mine.close()
    other.close()


@pytest.mark.parametrize("down", ["refused", "silent", "in the middle"])
def test_an_interface_that_is_down_is_left_out(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, down: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(net, "_STALL", 0.5)
    monkeypatch.setattr(net, "_PUSHED_ALONE", 4)
    mine, relay = TcpTransport(ReplicaStore(), SECRET), Stuck(peer.address)
    both = f"{relay.address},{peer.address}"
    if down == "refused":
        relay.close()
    if down == "silent":
        relay.stuck.set()

    def gate() -> None:
        if down == "in the middle" and mine.sent_bytes > 8 * CHUNK:
            relay.stuck.set()

    copies = [make(size * CHUNK + 1, role) for role, size in enumerate((64, 1, 2, 64))]
    for copy in copies:
        assert push(mine, both, copy, gate=gate) == copy[0].nbytes
        assert fetch(mine, both, copy[0].id) == (copy[0], copy[2], bytearray(copy[1]))
    assert mine.request(both, StrikeCopy("x", 1), 20) == Accepted()
    assert [record.args[1] for record in caplog.records] == [relay.address]  # once
    mine.close()
    relay.close()


def test_without_any_way_left_the_error_says_so(mine: TcpTransport) -> None:
    closed = [listen("127.0.0.1") for _ in range(2)]
    ways = [f"127.0.0.1:{each.getsockname()[1]}" for each in closed]
    for each in closed:
        each.close()
    for _ in range(2):
        with pytest.raises(TransportError, match="refused"):
            push(mine, ",".join(ways), make(100))


def test_a_slow_interface_is_left_out(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "_PUSHED_ALONE", 4)
    mine, relay = TcpTransport(ReplicaStore(), SECRET), Stuck(peer.address)
    relay.slow.set()
    both, copy = f"{relay.address},{peer.address}", make(64 * CHUNK)
    assert push(mine, both, copy) == copy[0].nbytes
    assert mine._left_out.rest(both) == [peer.address]
    mine.close()
    relay.close()

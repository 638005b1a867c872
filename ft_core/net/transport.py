"""Moves segments between agents: `Transport`, the interface, and `TcpTransport`, which needs nothing special.

A *push* leaves a verified copy of a segment with another agent (replication, in each step); a *fetch* gets
one (recovery). Both move 1 MiB chunks, a few in a message, each checked against its xxh3_64 while it is hot
in the cache, striped over a few connections. Every call has one deadline for the whole of it: a peer that is
stopped, not dead, would otherwise hold it for ever. The other side of the conversation is
`transport_server.PeerServer`.

The requests on a connection, and their answers, are in `protocol.transfers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from ft_core.errors import AuthenticationError, CorruptSnapshot, FtError, ProtocolError, TransportError
from ft_core.net.transport_server import (
    MAX_SEGMENT_BYTES,
    PeerServer,
    SegmentStore,
    checked_segment,
    chunk,
    describe,
    run_from,
)
from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import Message
from ft_core.protocol.sockets import as_bytes
from ft_core.protocol.transfers import (
    ANSWER,
    RUN,
    Accepted,
    Answer,
    BadChunks,
    Chunks,
    ChunksHere,
    ChunksSent,
    CommitPush,
    DoneReading,
    Failed,
    FetchSegment,
    Found,
    PushBegun,
    PushSegment,
    Question,
    ReadChunks,
    Request,
    SegmentLent,
)
from ft_core.state.manifest import Segment

A = TypeVar("A", bound=Message)
_Channel = Channel[Answer]

_FETCHED_ALONE, _PUSHED_ALONE = 4, 64
"""Segments up to this many chunks use one connection: a second costs more than it saves. That is CPU time of
cores that train where a segment is pushed, in each step, and time where all wait for one that is fetched."""

_DROPPED = "this agent dropped its connections because a new epoch began, the peer is gone, or it is closing"
_CONNECT = 10.0
"""Seconds that an agent may take to let another in."""


class Transport(Protocol):
    """What the agent needs from a transport. Every `deadline` is in seconds, for the call as a whole."""

    address: str
    """Where peers reach this agent, "host:port"."""
    sent_bytes: int
    """Payload pushed to peers so far, repeated chunks included."""
    received_bytes: int
    """Payload received so far: pushed by peers, and fetched."""

    def push(
        self,
        address: str,
        segment: Segment,
        version: int,
        data: memoryview,
        checksums: Sequence[int],
        *,
        epoch: int,
        gate: Callable[[], None],
        deadline: float,
    ) -> int:
        """Leave a verified copy of `data` with the agent at `address`; on return it is committed there.

        `gate` is called before each message, by several threads, and returns when the network is free (TRAIN
        before STATE). Returns the payload bytes sent: none of what the peer has, from an older copy. Raises
        TransportError (peer gone, deadline, refused) or CorruptSnapshot (`data` is not what was checksummed).
        """

    def fetch(
        self,
        address: str,
        segment_id: str,
        version: int,
        *,
        allocate: Callable[[Segment], memoryview],
        deadline: float,
    ) -> tuple[Segment, list[int]]:
        """Get a segment from the agent at `address` into the memory `allocate` gives for it.

        Returns its layout and checksums once every chunk is verified. Raises TransportError (peer gone,
        deadline, has no such copy) or CorruptSnapshot (its copy is bad); the memory's content is then
        undefined and must not be used.
        """

    def request(self, address: str, question: Question, deadline: float) -> Found:
        """Ask another agent a small question. Raises TransportError, also if it answers with an error."""

    def close_peers(self, address: str | None = None) -> None:
        """Drop every outgoing connection (a new epoch began), or those to one agent, which is gone: calls in
        progress raise TransportError."""

    def close(self) -> None:
        """Close, and stop serving. Returns when the server's threads have ended."""


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the deadline of {self.seconds:g} s passed")
        return left


class _Peers:
    """Outgoing connections, kept for reuse. Each is used by one call at a time."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Channel]] = {}
        self._busy: set[_Channel] = set()
        self._drops = 0

    def take(self, address: str, limit: _Deadline) -> _Channel:
        with self._lock:
            drops = self._drops
            idle = self._idle.get(address, [])
            while idle:
                channel = idle.pop()
                if channel.idle():
                    self._busy.add(channel)
                    return channel
                channel.close()  # the peer restarted since
        channel = Channel.connect(address, self._secret, ANSWER, min(limit.left(), _CONNECT))
        with self._lock:
            if drops == self._drops:
                self._busy.add(channel)
                return channel
        channel.close()
        raise ConnectionAbortedError(_DROPPED)

    def give_back(self, channel: _Channel, address: str) -> None:
        with self._lock:
            if channel in self._busy:
                self._busy.remove(channel)
                self._idle.setdefault(address, []).append(channel)
                return
        channel.close()

    def discard(self, channel: _Channel) -> bool:
        """Close a connection after a failure; False if the failure came from `drop`."""
        with self._lock:
            mine = channel in self._busy
            self._busy.discard(channel)
        channel.close()
        return mine

    def drop(self, address: str | None = None) -> None:
        with self._lock:
            self._drops += address is None
            for to in [address] if address is not None else list(self._idle):
                for channel in self._idle.pop(to, ()):
                    channel.close()
            for channel in [c for c in self._busy if address in (None, c.peer)]:
                channel.abort()  # its user closes it
                self._busy.remove(channel)


class TcpTransport:
    """Segments over plain TCP: 2 streams of 1 MiB chunks were the fastest and cheapest here (FINDINGS.md)."""

    def __init__(
        self,
        store: SegmentStore,
        secret: bytes,
        host: str = "127.0.0.1",
        streams: int = 2,
        answer: Callable[[Question], Found] | None = None,
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
        port: int = 0,
    ) -> None:
        """Listens on `host` at once, at `port` or any that is free; `answer` serves `request` of others, in
        threads of the server."""
        self._streams = streams
        self._max_segment_bytes = max_segment_bytes
        self._peers = _Peers(secret)
        self._server = PeerServer(store, secret, host, answer, max_segment_bytes, port)
        self.address = self._server.address
        self._count_lock = threading.Lock()
        self._fetched_bytes = 0
        self.sent_bytes = 0

    @property
    def received_bytes(self) -> int:
        return self._server.received_bytes + self._fetched_bytes

    def push(
        self,
        address: str,
        segment: Segment,
        version: int,
        data: memoryview,
        checksums: Sequence[int],
        *,
        epoch: int,
        gate: Callable[[], None],
        deadline: float,
    ) -> int:
        """As `Transport.push`."""
        data = as_bytes(data)
        if len(data) != segment.nbytes or len(checksums) != segment.chunks:
            raise ValueError(
                f"segment {segment.id} has {segment.nbytes} bytes and {segment.chunks} chunks, "
                f"got {len(data)} bytes and {len(checksums)} checksums"
            )
        limit = _Deadline(deadline)
        what = describe(segment, version)

        def stripe(channel: _Channel, first: int, step: int) -> None:
            def send(start: int, part: memoryview) -> None:
                gate()
                channel.settimeout(limit.left())
                channel.send(Chunks(token, start), part)
                with self._count_lock:
                    self.sent_bytes += len(part)

            def bad() -> list[int]:
                return _ask(channel, ChunksSent(token), limit, BadChunks).chunks

            mine = runs[first::step]
            for run in mine:
                send(run.start, run_from(data, run.start, run.stop))
            if not (again := bad()):
                return
            if not set(again) <= {index for run in mine for index in run}:
                raise ProtocolError(f"{channel.peer} complains of chunks that it was not sent")
            for index in again:
                send(index, chunk(data, index))
            if not (still := bad()):
                return
            raise CorruptSnapshot(
                f"{what}: chunk {still[0]} does not match its checksum at agent {address}, sent twice by "
                f"agent {self.address}: the sender's memory changed since it was checksummed, or its network "
                f"is bad; the copy is not used"
            )

        with self._call(f"pushing {what} to agent {address}") as use:
            control = use(address, limit)
            request = PushSegment(segment.layout, version, epoch, list(checksums), limit.left())
            begun = _ask(control, request, limit, PushBegun)
            if not (token := begun.token):
                return 0
            runs = _messages(begun.missing, segment)
            many = sum(map(len, runs))
            self._striped(control, lambda: use(address, limit), many, stripe, _PUSHED_ALONE)
            _ask(control, CommitPush(token), limit, Accepted)
        return sum(len(run_from(data, run.start, run.stop)) for run in runs)

    def fetch(
        self,
        address: str,
        segment_id: str,
        version: int,
        *,
        allocate: Callable[[Segment], memoryview],
        deadline: float,
    ) -> tuple[Segment, list[int]]:
        """As `Transport.fetch`."""
        limit = _Deadline(deadline)

        def read(channel: _Channel, runs: range) -> list[int]:
            """Ask for the chunks of `runs`; returns those that came bad."""
            bad = []
            channel.settimeout(limit.left())
            channel.send(ReadChunks(token, runs.start, runs.stop, runs.step))
            for first in runs:
                channel.settimeout(limit.left())
                here = _checked(channel.recv(), channel, ChunksHere)
                size = len(run_from(data, first, runs.stop))
                if here.first != first or channel.payload_bytes != size:
                    raise ProtocolError(f"{channel.peer} did not send chunk {first} when it was due")
                for index in range(first, min(first + RUN, runs.stop)):
                    part = chunk(data, index)
                    channel.settimeout(limit.left())
                    channel.recv_payload_into(part)
                    if xxh3_64_intdigest(part) != checksums[index]:
                        bad.append(index)
                with self._count_lock:
                    self._fetched_bytes += size
            return bad

        def stripe(channel: _Channel, first: int, step: int) -> None:
            for index in read(channel, range(first * RUN, segment.chunks, step * RUN)):
                if read(channel, range(index, index + 1)):
                    raise CorruptSnapshot(
                        f"{describe(segment, version)}: chunk {index} of the copy held by agent {address} "
                        f"does not match its checksum, read twice by agent {self.address}: that node's "
                        f"memory or network is bad; nothing was loaded"
                    )

        with self._call(f"fetching segment {segment_id} version {version} from agent {address}") as use:
            control = use(address, limit)
            lent = _ask(control, FetchSegment(segment_id, version, limit.left()), limit, SegmentLent)
            token, checksums = lent.token, lent.checksums
            segment = checked_segment(lent.segment, checksums, self._max_segment_bytes)
            if segment.id != segment_id:
                raise ProtocolError(f"it answered with segment {segment.id}")
            data = as_bytes(allocate(segment))
            if len(data) != segment.nbytes:
                raise ProtocolError(
                    f"its copy has {segment.nbytes} bytes, and room was made for the {len(data)} of another's"
                )
            self._striped(control, lambda: use(address, limit), segment.chunks, stripe, _FETCHED_ALONE)
            _ask(control, DoneReading(token), limit, Accepted)
        return segment, checksums

    def request(self, address: str, question: Question, deadline: float) -> Found:
        """As `Transport.request`."""
        limit = _Deadline(deadline)
        with self._call(f"asking agent {address}") as use:
            found = _ask(use(address, limit), question, limit, Message)
            if not isinstance(found, Found):
                raise ProtocolError(f"it answered with {type(found).__name__}")
            return found

    def close_peers(self, address: str | None = None) -> None:
        """As `Transport.close_peers`."""
        self._peers.drop(address)

    def close(self) -> None:
        """As `Transport.close`."""
        self._peers.drop()
        self._server.close()

    @contextmanager
    def _call(self, doing: str) -> Iterator[Callable[[str, _Deadline], _Channel]]:
        """Yields what gets connections; gives them back after success, closes them (so that the peer forgets
        the call too) after failure, and makes TransportErrors that say what was being done."""
        taken: list[tuple[_Channel, str]] = []

        def use(address: str, limit: _Deadline) -> _Channel:
            taken.append((self._peers.take(address, limit), address))
            return taken[-1][0]

        try:
            yield use
        except BaseException as error:
            dropped = [channel for channel, _ in taken if not self._peers.discard(channel)]
            if isinstance(error, TransportError | OSError | AuthenticationError | ProtocolError):
                raise TransportError(f"{doing} failed: {_DROPPED if dropped else error}") from error
            raise
        for channel, address in taken:
            self._peers.give_back(channel, address)

    def _striped(
        self,
        control: _Channel,
        another: Callable[[], _Channel],
        chunks: int,
        stripe: Callable[[_Channel, int, int], None],
        alone: int,
    ) -> None:
        """Run stripe(channel, i, n) on n connections at once, the first in this thread. One is enough for
        `alone` of so many chunks.

        The first failure wakes the other stripes and is the one that is raised.
        """
        extra = 0 if chunks <= alone else self._streams - 1
        channels = [control] + [another() for _ in range(extra)]
        failures: list[BaseException] = []

        def run(i: int) -> None:
            try:
                stripe(channels[i], i, len(channels))
            except BaseException as error:
                failures.append(error)
                for channel in channels:
                    channel.abort()

        threads = [
            threading.Thread(target=run, args=(i,), name=f"ft-stripe-{i}") for i in range(1, len(channels))
        ]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def _messages(missing: Sequence[tuple[int, int]], segment: Segment) -> list[range]:
    """Which chunks each message of a push has. Raises ProtocolError unless `missing` makes sense."""
    at = 0
    for first, stop in missing:
        if not at <= first < stop <= segment.chunks:
            raise ProtocolError(f"it misses chunks {first} to {stop} of {segment.chunks}")
        at = stop
    return [
        range(start, min(start + RUN, stop)) for first, stop in missing for start in range(first, stop, RUN)
    ]


def _checked(message: Answer, channel: _Channel, kind: type[A]) -> A:
    """The answer, unless it is an error, which is raised as it was at the peer."""
    if isinstance(message, Failed):
        failure: type[FtError] = CorruptSnapshot if message.corrupt else TransportError
        raise failure(f"agent {channel.peer} answered: {message.error}")
    if not isinstance(message, kind):
        raise ProtocolError(f"{channel.peer} answered with {type(message).__name__}")
    return message


def _ask(channel: _Channel, request: Request, limit: _Deadline, kind: type[A]) -> A:
    channel.settimeout(limit.left())
    channel.send(request)
    channel.settimeout(limit.left())
    return _checked(channel.recv(), channel, kind)

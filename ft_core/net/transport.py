"""Moves segments between agents: `Transport`, the interface, and `TcpTransport`, which needs nothing special.

A *push* leaves a verified copy of a segment with another agent (replication, in each step); a *fetch* gets
one (recovery). Both move 1 MiB chunks, a few in a message, each checked against its xxh3_64 while it is hot
in the cache, striped over a few connections. Every call has one deadline for the whole of it: a peer that is
stopped, not dead, would otherwise hold it for ever. The other side of the conversation is
`transport_server.PeerServer`.

The requests on a connection, and their answers, are in `protocol.transfers`.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

log = logging.getLogger(__name__)
A = TypeVar("A", bound=Message)
T = TypeVar("T")
_Channel = Channel[Answer]

_FETCHED_ALONE, _PUSHED_ALONE = 4, 64
"""Segments up to this many chunks use one connection: a second costs more than it saves. That is CPU time of
cores that train where a segment is pushed, in each step, and time where all wait for one that is fetched."""

_DROPPED = "this agent dropped its connections because a new epoch began, the peer is gone, or it is closing"
_CONNECT = 10.0
"""Seconds that an agent may take to let another in."""
_STALL = 3.0
"""Seconds without progress after which another way to the peer is taken, where there is one."""
_LEFT_OUT, _LONGEST = 60.0, 3600.0
"""Seconds for which a way that is dead or slow is left out the first time, and at most: twice as long each
time."""
_SLOW, _SHARE = 0.25, 0.5
"""A way is slow that keeps the others waiting for so many seconds, and this part of the whole transfer."""
_BATCHES = 4
"""Parts that each connection takes of a fetch, one after the other: who is faster takes more."""


class Transport(Protocol):
    """What the agent needs from a transport. Every `deadline` is in seconds, for the call as a whole."""

    address: str
    """Where peers reach this agent: "host:port", or several, one for each interface, with commas between."""
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
    def __init__(self, seconds: float, stall: float = math.inf, end: float | None = None) -> None:
        """`stall`: the most that any part may take."""
        self.seconds, self._stall = seconds, stall
        self._end = time.monotonic() + seconds if end is None else end

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the deadline of {self.seconds:g} s passed")
        return min(left, self._stall)

    def whole(self) -> float:
        """All that is left, however little a part may take."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def impatient(self) -> _Deadline:
        """The same, for a way beside which there is another."""
        return _Deadline(self.seconds, _STALL, self._end)


class _LostError(ConnectionError):
    """One way to a peer failed: `way`, its address there."""

    def __init__(self, way: str, error: OSError) -> None:
        super().__init__(str(error))
        self.way = way


class _WayLostError(TransportError):
    """A call failed since one way did."""

    def __init__(self, text: str, way: str) -> None:
        super().__init__(text)
        self.way = way


@contextmanager
def _by(way: str) -> Iterator[None]:
    """Whatever fails in it failed by this way."""
    try:
        yield
    except OSError as error:
        if isinstance(error, _LostError):
            raise
        raise _LostError(way, error) from error


def _ways(address: str) -> list[str]:
    """The addresses of an agent, one for each of its interfaces."""
    return address.split(",")


class _LeftOut:
    """Ways that are dead or slow, and until when they are not used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, tuple[float, float]] = {}

    def rest(self, address: str) -> list[str]:
        """The ways that are used; all, where none is left."""
        ways, now = _ways(address), time.monotonic()
        with self._lock:
            return [way for way in ways if self._until.get(way, (0.0, 0.0))[0] <= now] or ways

    def add(self, way: str) -> float:
        """Leave it out from now on: for how many seconds."""
        with self._lock:
            pause = min(2 * self._until.get(way, (0.0, _LEFT_OUT / 2))[1], _LONGEST)
            self._until[way] = time.monotonic() + pause, pause
            return pause

    def forget(self, ways: Iterable[str]) -> None:
        """Their agent is gone."""
        with self._lock:
            for way in ways:
                self._until.pop(way, None)


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
        with _by(address):
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

    @property
    def drops(self) -> int:
        """How often all connections were dropped."""
        return self._drops

    def drop(self, address: str | None = None) -> None:
        with self._lock:
            self._drops += address is None
            ways = _ways(address) if address is not None else list(self._idle)
            for to in ways:
                for channel in self._idle.pop(to, ()):
                    channel.close()
            for channel in [c for c in self._busy if address is None or c.peer in ways]:
                channel.abort()  # its user closes it
                self._busy.remove(channel)


class TcpTransport:
    """Segments over plain TCP: 2 streams of 1 MiB chunks were the fastest and cheapest here (FINDINGS.md)."""

    def __init__(
        self,
        store: SegmentStore,
        secret: bytes,
        host: str | Sequence[str] = "127.0.0.1",
        streams: int = 2,
        answer: Callable[[Question], Found] | None = None,
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
        port: int = 0,
    ) -> None:
        """Listens on `host`, or several, at once, at `port` or any that is free; `answer` serves `request` of
        others, in threads of the server."""
        self._streams = streams
        self._max_segment_bytes = max_segment_bytes
        self._peers, self._left_out, self._turn = _Peers(secret), _LeftOut(), itertools.count()
        hosts = [host] if isinstance(host, str) else host
        self._server = PeerServer(store, secret, hosts, answer, max_segment_bytes, port)
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
        what = describe(segment, version)

        def attempt(ways: list[str], limit: _Deadline) -> int:
            with self._call(f"pushing {what} to agent {address}", ways, limit) as use:
                return self._push(
                    use, len(ways), limit, address, segment, version, data, checksums, epoch, gate
                )

        return self._by_any_way(address, _Deadline(deadline), attempt)

    def _push(
        self,
        use: Callable[[], _Channel],
        ways: int,
        limit: _Deadline,
        address: str,
        segment: Segment,
        version: int,
        data: memoryview,
        checksums: Sequence[int],
        epoch: int,
        gate: Callable[[], None],
    ) -> int:
        def stripe(channel: _Channel) -> None:
            def send(start: int, part: memoryview) -> None:
                gate()
                channel.settimeout(limit.left())
                channel.send(Chunks(token, start), part)
                with self._count_lock:
                    self.sent_bytes += len(part)

            def bad() -> list[int]:
                return _ask(channel, ChunksSent(token), limit, BadChunks).chunks

            mine = []
            for run in left:  # whichever connection is free takes the next
                mine.append(run)
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
                f"{describe(segment, version)}: chunk {still[0]} does not match its checksum at agent "
                f"{address}, sent twice by agent {self.address}: the sender's memory changed since it was "
                f"checksummed, or its network is bad; the copy is not used"
            )

        control = use()
        request = PushSegment(segment.layout, version, epoch, list(checksums), limit.whole())
        begun = _ask(control, request, limit, PushBegun)
        if not (token := begun.token):
            return 0
        runs = _messages(begun.missing, segment)
        left = iter(runs)
        extra = self._extra(ways) if sum(map(len, runs)) > _PUSHED_ALONE else 0
        self._striped([control] + [use() for _ in range(extra)], stripe)
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

        def attempt(ways: list[str], limit: _Deadline) -> tuple[Segment, list[int]]:
            with self._call(
                f"fetching segment {segment_id} version {version} from agent {address}", ways, limit
            ) as use:
                return self._fetch(use, len(ways), limit, address, segment_id, version, allocate)

        return self._by_any_way(address, _Deadline(deadline), attempt)

    def _fetch(
        self,
        use: Callable[[], _Channel],
        ways: int,
        limit: _Deadline,
        address: str,
        segment_id: str,
        version: int,
        allocate: Callable[[Segment], memoryview],
    ) -> tuple[Segment, list[int]]:
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

        def stripe(channel: _Channel) -> None:
            for index in itertools.chain.from_iterable(read(channel, part) for part in left):
                if read(channel, range(index, index + 1)):
                    raise CorruptSnapshot(
                        f"{describe(segment, version)}: chunk {index} of the copy held by agent {address} "
                        f"does not match its checksum, read twice by agent {self.address}: that node's "
                        f"memory or network is bad; nothing was loaded"
                    )

        control = use()
        lent = _ask(control, FetchSegment(segment_id, version, limit.whole()), limit, SegmentLent)
        token, checksums = lent.token, lent.checksums
        segment = checked_segment(lent.segment, checksums, self._max_segment_bytes)
        if segment.id != segment_id:
            raise ProtocolError(f"it answered with segment {segment.id}")
        data = as_bytes(allocate(segment))
        if len(data) != segment.nbytes:
            raise ProtocolError(
                f"its copy has {segment.nbytes} bytes, and room was made for the {len(data)} of another's"
            )
        extra = self._extra(ways) if segment.chunks > _FETCHED_ALONE else 0
        parts = _BATCHES * (extra + 1) if extra else 1
        each = max(1, -(-segment.chunks // (RUN * parts))) * RUN
        left = iter([range(at, min(at + each, segment.chunks), RUN) for at in range(0, segment.chunks, each)])
        self._striped([control] + [use() for _ in range(extra)], stripe)
        _ask(control, DoneReading(token), limit, Accepted)
        return segment, checksums

    def request(self, address: str, question: Question, deadline: float) -> Found:
        """As `Transport.request`."""

        def attempt(ways: list[str], limit: _Deadline) -> Found:
            with self._call(f"asking agent {address}", ways, limit) as use:
                found = _ask(use(), question, limit, Message)
                if not isinstance(found, Found):
                    raise ProtocolError(f"it answered with {type(found).__name__}")
                return found

        return self._by_any_way(address, _Deadline(deadline), attempt)

    def close_peers(self, address: str | None = None) -> None:
        """As `Transport.close_peers`."""
        self._peers.drop(address)
        if address is not None:
            self._left_out.forget(_ways(address))

    def close(self) -> None:
        """As `Transport.close`."""
        self._peers.drop()
        self._server.close()

    def _by_any_way(self, address: str, limit: _Deadline, attempt: Callable[[list[str], _Deadline], T]) -> T:
        """What `attempt` gives, by the ways to an agent that are in use. If one fails it is left out, and all
        is tried again by the others."""
        lost, drops = set[str](), self._peers.drops
        while True:
            ways = self._left_out.rest(address)
            try:
                return attempt(ways, limit.impatient() if len(ways) > 1 else limit)
            except _WayLostError as error:
                lost.add(error.way)
                if len(lost) == len(_ways(address)) or limit.over or self._peers.drops != drops:
                    raise
                self._leave_out(error.way, str(error))

    def _leave_out(self, way: str, why: str) -> None:
        pause = self._left_out.add(way)
        log.warning("transport at %s: %s is left out for %.0f s: %s", self.address, way, pause, why)

    @contextmanager
    def _call(self, doing: str, ways: list[str], limit: _Deadline) -> Iterator[Callable[[], _Channel]]:
        """Yields what gets connections, by one way after the other; gives them back after success, closes
        them (so that the peer forgets the call too) after failure, and makes TransportErrors that say what
        was being done."""
        taken: list[tuple[_Channel, str]] = []
        turn = next(self._turn)

        def use() -> _Channel:
            way = ways[(turn + len(taken)) % len(ways)]
            taken.append((self._peers.take(way, limit), way))
            return taken[-1][0]

        try:
            yield use
        except BaseException as error:
            dropped = [channel for channel, _ in taken if not self._peers.discard(channel)]
            if isinstance(error, _LostError) and not dropped:
                raise _WayLostError(f"{doing} failed: {error}", error.way) from error
            if isinstance(error, TransportError | OSError | AuthenticationError | ProtocolError):
                raise TransportError(f"{doing} failed: {_DROPPED if dropped else error}") from error
            raise
        for channel, way in taken:
            self._peers.give_back(channel, way)

    def _extra(self, ways: int) -> int:
        """How many connections there are beside the first: one for each way at least."""
        return max(self._streams, ways) - 1

    def _striped(self, channels: list[_Channel], stripe: Callable[[_Channel], None]) -> None:
        """Run `stripe` on all connections at once, on the first in this thread.

        The first failure wakes the other stripes and is the one that is raised. Of several ways, one that
        keeps the others waiting is left out of what comes later.
        """
        failures: list[BaseException] = []
        began, ends = time.monotonic(), [0.0] * len(channels)

        def run(i: int) -> None:
            try:
                with _by(channels[i].peer):
                    stripe(channels[i])
            except BaseException as error:
                failures.append(error)
                for channel in channels:
                    channel.abort()
            ends[i] = time.monotonic()

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
        last = max(range(len(ends)), key=ends.__getitem__)
        others = [
            end for end, channel in zip(ends, channels, strict=True) if channel.peer != channels[last].peer
        ]
        waited = ends[last] - max(others, default=ends[last])
        if waited > max(_SLOW, _SHARE * (ends[last] - began)):
            self._leave_out(channels[last].peer, f"the other interfaces waited {waited:.2f} s for it")


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
    with _by(channel.peer):
        channel.settimeout(limit.left())
        channel.send(request)
        channel.settimeout(limit.left())
        return _checked(channel.recv(), channel, kind)

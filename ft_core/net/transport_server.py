"""Serves other agents: takes segments they push into the store, and gives them those that they fetch.

One thread listens, one serves each connection. Whatever a peer sends, the worst it gets is an error and a
closed connection; nothing is allocated by its numbers before they were checked against the limit.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from ft_core.errors import AuthenticationError, CorruptSnapshot, FtError, ProtocolError, TransportError
from ft_core.process.refusals import Refusals
from ft_core.protocol.acceptor import connections
from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import Layout
from ft_core.protocol.sockets import ENDS_BEFORE, as_bytes, ends_first, join_address, listen
from ft_core.protocol.transfers import (
    REQUEST,
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
from ft_core.state.manifest import CHUNK, CopyTarget, Segment

log = logging.getLogger(__name__)
_Channel = Channel[Request]

MAX_SEGMENT_BYTES = 256 << 30
_MISSING, _COMING, _VERIFIED = range(3)


class SegmentStore(Protocol):
    """Where a transport's server puts the segments pushed to it and finds those asked for. Thread-safe.

    `begin`, writes into the view, then exactly one of `commit` and `discard`; a `commit` that raises is also
    followed by `discard`. Methods may raise FtError: its text goes to the sender.
    """

    def begin(
        self, segment: Segment, version: int, epoch: int, checksums: Sequence[int]
    ) -> CopyTarget | None:
        """Room for a copy, or None: a verified one is here already."""

    def commit(self, segment: Segment, version: int) -> None:
        """Every chunk was verified: the copy is valid from now on."""

    def discard(self, segment: Segment, version: int) -> None:
        """The push ended early; nobody writes into the view any more."""

    def find(self, segment_id: str, version: int) -> tuple[Segment, memoryview, Sequence[int]] | None:
        """A valid copy with its checksums. Its bytes must not change while the view is referenced."""


def chunk(data: memoryview, index: int) -> memoryview:
    """Chunk `index` of a segment's bytes; the last may be shorter."""
    return data[index * CHUNK : (index + 1) * CHUNK]


def run_from(data: memoryview, first: int, stop: int) -> memoryview:
    """The chunks from `first` on that one message has, as far as they are before `stop`."""
    return data[first * CHUNK : min(first + RUN, stop) * CHUNK]


def describe(segment: Segment, version: int) -> str:
    """For messages: which segment, whose, of which step."""
    roles = ", ".join(map(str, segment.holders[:8])) + (", ..." if len(segment.holders) > 8 else "")
    return f"segment {segment.id} (of role {roles}) version {version}"


def checked_segment(layout: Layout, checksums: Sequence[int], max_bytes: int) -> Segment:
    """The segment in a peer's message. Raises ProtocolError unless it, and its checksums, make sense."""
    segment = Segment.of(layout)
    if not segment.holders or len(set(segment.holders)) != len(segment.holders):
        raise ProtocolError("a segment needs distinct holders")
    end = 0
    for item in segment.items:
        if item.offset < end:
            raise ProtocolError(f"item {item.name!r} overlaps the one before it")
        end = item.offset + item.nbytes
        if end > max_bytes:
            raise ProtocolError(f"a segment of {end} bytes or more is over the limit of {max_bytes}")
    if len(checksums) != segment.chunks:
        raise ProtocolError(f"{len(checksums)} checksums for {segment.chunks} chunks")
    if any(checksum >= 1 << 64 for checksum in checksums):
        raise ProtocolError("checksums must be unsigned 64-bit numbers")
    return segment


class _Push:
    """A segment on its way in. Several connections write chunks; `commit` or `cancel` ends it, once."""

    def __init__(
        self,
        store: SegmentStore,
        segment: Segment,
        version: int,
        epoch: int,
        room: CopyTarget,
        checksums: Sequence[int],
        end: float,
    ) -> None:
        self.segment = segment
        self.version = version
        self.epoch = epoch
        self.end = end
        self._store = store
        self._data = room.data
        self._checksums = checksums
        self._changed = threading.Condition()
        self._chunks = bytearray(segment.chunks)  # _MISSING, _COMING or _VERIFIED
        for index, (there, wanted) in enumerate(zip(room.checksums, checksums, strict=False)):
            if there == wanted:
                self._chunks[index] = _VERIFIED
        self._writers: set[_Channel] = set()
        self._bad: dict[_Channel, list[int]] = {}
        self._over = False  # no chunk is taken any more
        self._ended = False  # the store knows, too

    def missing(self) -> list[tuple[int, int]]:
        """Runs of chunks that are not here."""
        runs, start, chunks = [], 0, bytes(self._chunks)
        while (start := chunks.find(_MISSING, start)) >= 0:
            stop = chunks.find(_VERIFIED, start)
            runs.append((start, stop if stop >= 0 else len(chunks)))
            start = runs[-1][1]
        return runs

    def receive(self, channel: _Channel, first: int) -> int:
        """Take the chunks from `first` on, the payload that follows on `channel`. Returns its size."""
        size = channel.payload_bytes
        stop = first + max(1, -(-size // CHUNK))
        with self._changed:
            if self._over:
                raise TransportError(f"the push of {describe(self.segment, self.version)} was superseded")
            if stop > len(self._chunks) or any(self._chunks[first:stop]):
                raise ProtocolError(f"one of chunks {first} to {stop - 1} does not exist or came already")
            expected = len(self._data[first * CHUNK : stop * CHUNK])
            if size != expected:
                raise ProtocolError(f"chunk {stop - 1} has not the size that it should have")
            self._chunks[first:stop] = bytes([_COMING]) * (stop - first)
            self._writers.add(channel)
        found, bad = bytearray(stop - first), []
        try:
            for index in range(first, stop):
                part = chunk(self._data, index)
                channel.settimeout(max(self.end - time.monotonic(), 1e-3))
                channel.recv_payload_into(part)
                if xxh3_64_intdigest(part) == self._checksums[index]:  # while it is in the cache
                    found[index - first] = _VERIFIED
                else:
                    bad.append(index)
        finally:
            with self._changed:
                self._chunks[first:stop] = found
                self._writers.discard(channel)
                self._changed.notify_all()
        if bad:
            self._bad.setdefault(channel, []).extend(bad)
        return size

    def take_bad(self, channel: _Channel) -> list[int]:
        """Chunks that came on this connection since last asked and did not match their checksums."""
        return self._bad.pop(channel, [])

    def commit(self) -> None:
        with self._changed:
            if self._over:
                raise TransportError(f"the push of {describe(self.segment, self.version)} was superseded")
            missing = len(self._chunks) - self._chunks.count(_VERIFIED)
            if missing:
                raise ProtocolError(f"commit of a push with {missing} chunks missing")
            self._over = self._ended = True  # for others only once this block is left
            try:
                self._store.commit(self.segment, self.version)
            except BaseException:
                self._store.discard(self.segment, self.version)
                raise

    def cancel(self) -> None:
        """Forget the push unless it was committed. On return nobody writes into its memory any more."""
        with self._changed:
            if self._over:
                self._changed.wait_for(lambda: self._ended)  # another thread cancels and waits for writers
                return
            self._over = True
            for channel in self._writers:
                channel.abort()
            self._changed.wait_for(lambda: not self._writers)
            try:
                self._store.discard(self.segment, self.version)
            finally:
                self._ended = True
                self._changed.notify_all()


class _Lease:
    """A copy that a peer is fetching, kept from being overwritten by the reference to its view."""

    def __init__(self, data: memoryview, chunks: int, end: float) -> None:
        self.data = data
        self.chunks = chunks
        self.end = end

    def cancel(self) -> None:
        pass


_Owned = dict[str, _Push | _Lease]
"""By token, what a connection began and what ends with it."""

J = TypeVar("J", _Push, _Lease)


class PeerServer:
    """Listens at `address` until `close`, on several interfaces where that has several; `received_bytes`
    counts the payload pushed to it."""

    def __init__(
        self,
        store: SegmentStore,
        secret: bytes,
        hosts: Sequence[str],
        answer: Callable[[Question], Found] | None,
        max_segment_bytes: int,
        port: int = 0,
    ) -> None:
        self._store = store
        self._secret = secret
        self._asked = answer
        self._max_segment_bytes = max_segment_bytes
        self._listeners = [listen(host, port) for host in hosts]
        # Once the controller sees the end of an agent, others are to find that nothing listens here any more.
        self._last = [ends_first(each, ENDS_BEFORE + number) for number, each in enumerate(self._listeners)]
        ports = [each.getsockname()[1] for each in self._listeners]
        self.address = ",".join(map(join_address, hosts, ports))
        self.received_bytes = 0
        self._lock = threading.Lock()
        self._begin_lock = threading.Lock()
        self._jobs: _Owned = {}
        self._coming: dict[str, _Push] = {}  # segment id -> its push in progress
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._refusals = Refusals(lambda reason: log.warning("transport at %s: %s", self.address, reason))
        self._acceptors = [
            threading.Thread(target=self._accept, args=(each,), name="ft-transport-accept", daemon=True)
            for each in self._listeners
        ]
        for acceptor in self._acceptors:
            acceptor.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            threads = [*self._acceptors, *self._threads]
            for sock in [*self._listeners, *self._sockets]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that is blocked in it
        for thread in threads:
            thread.join(timeout=10)
            if thread.is_alive():  # in the agent's `answer`, most likely
                log.warning("transport at %s: thread %s does not end", self.address, thread.name)
        for listener in (*self._listeners, *self._last):
            if listener is not None:
                listener.close()

    def _accept(self, listener: socket.socket) -> None:
        who = f"transport at {self.address}"
        for sock in connections(listener, self._secret, who, lambda: self._closed):
            thread = threading.Thread(
                target=self._connection, args=(sock,), name="ft-transport-peer", daemon=True
            )
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                try:
                    thread.start()
                except RuntimeError as error:
                    log.error("transport at %s refuses a connection: %s", self.address, error)
                    sock.close()
                    continue
                self._sockets.add(sock)
                self._threads.add(thread)

    def _connection(self, sock: socket.socket) -> None:
        try:
            try:
                channel = Channel.accept(sock, self._secret, REQUEST)
            except AuthenticationError as error:
                self._refusals.add(str(error))
                return
            self._serve(channel)
        finally:
            with self._lock:
                self._sockets.discard(sock)
                self._threads.discard(threading.current_thread())

    def _serve(self, channel: _Channel) -> None:
        owned: _Owned = {}
        try:
            while True:
                ends = [job.end for job in owned.values()]
                channel.settimeout(max(min(ends) - time.monotonic(), 1e-3) if ends else None)
                self._handle(channel, owned)
        except (ConnectionError, TimeoutError) as error:
            if owned:  # the copy that it was to replace is still there
                log.info("transport at %s: unfinished transfer given up: %s", self.address, error)
        except (ProtocolError, AuthenticationError) as error:
            self._refusals.add(str(error))
        finally:
            for token in list(owned):
                self._finish(token, owned)
            channel.close()

    def _handle(self, channel: _Channel, owned: _Owned) -> None:
        """Serve one request. A refusal is answered; nonsense is answered and then raised, to close."""
        try:
            request = channel.recv()
            if channel.payload_bytes and not isinstance(request, Chunks):
                raise ProtocolError(f"{type(request).__name__} of {channel.peer} has no payload")
            if isinstance(request, Chunks):
                size = self._job(request.token, _Push).receive(channel, request.first)
                with self._lock:
                    self.received_bytes += size
                return
            if isinstance(request, ReadChunks):
                self._read(channel, self._job(request.token, _Lease), request)
                return
            reply = self._reply(channel, request, owned)
        except (ConnectionError, TimeoutError, AuthenticationError):
            raise
        except ProtocolError as error:
            with contextlib.suppress(OSError):  # where it was no frame, the connection is closed already
                self._answer(channel, Failed(str(error)))
            raise
        except Exception as error:
            if not isinstance(error, FtError):
                log.exception("transport at %s: a request failed", self.address)
            channel.skip_payload()
            reply = Failed(str(error), corrupt=isinstance(error, CorruptSnapshot))
        self._answer(channel, reply)

    @staticmethod
    def _answer(channel: _Channel, answer: Answer) -> None:
        channel.settimeout(5)
        channel.send(answer)

    def _reply(
        self,
        channel: _Channel,
        request: PushSegment | ChunksSent | CommitPush | FetchSegment | DoneReading | Question,
        owned: _Owned,
    ) -> Answer:
        match request:
            case PushSegment():
                return self._begin(request, owned)
            case ChunksSent(token):
                return BadChunks(self._job(token, _Push).take_bad(channel))
            case CommitPush(token):
                self._job(token, _Push, owned).commit()
                self._finish(token, owned)
                return Accepted()
            case FetchSegment():
                return self._lend(request, owned)
            case DoneReading(token):
                self._job(token, _Lease, owned)
                self._finish(token, owned)
                return Accepted()
        if self._asked is None:
            raise TransportError("this agent answers no questions")
        try:
            return self._asked(request)
        except OSError as error:  # not one of this connection's
            raise TransportError(str(error)) from error

    def _job(self, token: str, kind: type[J], owned: _Owned | None = None) -> J:
        job = (self._jobs if owned is None else owned).get(token)
        if not isinstance(job, kind):
            raise TransportError("the transfer is over: it was superseded, or its first connection was lost")
        return job

    def _finish(self, token: str, owned: _Owned) -> None:
        job = owned.pop(token)
        job.cancel()
        with self._lock:
            self._jobs.pop(token, None)
            if isinstance(job, _Push) and self._coming.get(job.segment.id) is job:
                del self._coming[job.segment.id]

    def _begin(self, request: PushSegment, owned: _Owned) -> PushBegun:
        segment = checked_segment(request.segment, request.checksums, self._max_segment_bytes)
        version, epoch, checksums = request.version, request.epoch, request.checksums
        end = time.monotonic() + request.seconds  # when the caller has given up, so may we
        with self._begin_lock:
            before = self._coming.get(segment.id)
            if before is not None:
                if epoch < before.epoch:
                    raise TransportError(
                        f"stale sender: {describe(segment, version)} of epoch {epoch} while one of epoch "
                        f"{before.epoch} is coming in"
                    )
                before.cancel()  # its sender was replaced, or gave up and tries again
            room = self._store.begin(segment, version, epoch, checksums)
            if room is None:
                return PushBegun("", [])
            push = _Push(self._store, segment, version, epoch, room, checksums, end)
            missing = push.missing()
            token = secrets.token_hex(8)
            with self._lock:
                self._jobs[token] = owned[token] = self._coming[segment.id] = push
        return PushBegun(token, missing)

    def _lend(self, request: FetchSegment, owned: _Owned) -> SegmentLent:
        end = time.monotonic() + request.seconds
        found = self._store.find(request.segment, request.version)
        if found is None:
            raise TransportError(f"no valid copy of segment {request.segment} version {request.version} here")
        segment, data, checksums = found
        token = secrets.token_hex(8)
        with self._lock:
            self._jobs[token] = owned[token] = _Lease(as_bytes(data), segment.chunks, end)
        return SegmentLent(token, segment.layout, list(checksums))

    def _read(self, channel: _Channel, lease: _Lease, request: ReadChunks) -> None:
        if request.stop > lease.chunks:
            raise ProtocolError(f"chunks up to {request.stop} of a segment that has {lease.chunks}")
        for first in range(request.first, request.stop, request.step):
            channel.settimeout(max(lease.end - time.monotonic(), 1e-3))
            channel.send(ChunksHere(first), run_from(lease.data, first, request.stop))

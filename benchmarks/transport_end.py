"""One of the two ends of `benchmarks.transport`, a process on each node: what is sent, received and counted.

    python -m benchmarks.transport_end serve ADDRESS...
    python -m benchmarks.transport_end send WHAT ADDRESS...

`WHAT`: how many workers, the seconds of each measurement, and how often it is repeated. The addresses are the
server's, one for each interface; the first one's port `CONTROL` takes what the sender asks of it, as lines of
JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from xxhash import xxh3_64_intdigest

from ft_core.net.transport import TcpTransport
from ft_core.protocol.sockets import own_host
from ft_core.state.manifest import CHUNK, Segment, layout
from ft_core.state.memory import SharedMemory, snapshot_memory
from ft_core.state.replicas import ReplicaStore

CONTROL = 7000
_SECRET = b"of a benchmark"
_CHUNKS = 512
"""Of the segments of all workers together."""
_WARM = 2
"""Versions before anything is counted: both slots of each segment have their memory then."""
_AGAIN = 0.05


def _cpu(pids: Sequence[int]) -> float:
    """CPU seconds that these processes have taken so far."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), CHUNK):
        yield data[at : at + CHUNK]


def _open(interfaces: Sequence[str]) -> tuple[TcpTransport, list[int]]:
    """A transport as an agent has it, and the processes that it takes."""
    return TcpTransport(ReplicaStore(), _SECRET, host=interfaces), [os.getpid()]


# -- the server ----------------------------------------------------------------------------------------


class _Bare:
    """Receives bare streams, each into memory of its own, and checks what comes if it is to."""

    def __init__(self, addresses: Sequence[str], streams: int, verify: bool) -> None:
        self._verify = verify
        listeners = [socket.create_server((addresses[n % len(addresses)], 0)) for n in range(streams)]
        nbytes = max(1, _CHUNKS // streams) * CHUNK
        self.ports = [listener.getsockname()[1] for listener in listeners]
        self._threads = [threading.Thread(target=self._receive, args=(each, nbytes)) for each in listeners]
        for thread in self._threads:
            thread.start()

    def _receive(self, listener: socket.socket, nbytes: int) -> None:
        pieces = list(_pieces(snapshot_memory(nbytes).view))
        for piece in pieces:
            piece[:] = bytes(CHUNK)
        with listener:
            connection, _ = listener.accept()
        with connection:
            connection.sendall(b"r")
            while True:
                for piece in pieces:
                    if not connection.recv_into(piece, 0, socket.MSG_WAITALL):
                        connection.sendall(b"e")
                        return
                    if self._verify:
                        xxh3_64_intdigest(piece)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def serve(addresses: Sequence[str]) -> None:
    """Until the sender goes."""
    transport, pids = _open(addresses)
    bare: _Bare | None = None
    with socket.create_server((addresses[0], CONTROL)) as listener:
        connection, _ = listener.accept()
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            answer: Any = None
            match json.loads(line):
                case ["address"]:
                    answer = transport.address
                case ["cpu"]:
                    answer = _cpu(pids)
                case ["bare", streams, verify]:
                    bare = _Bare(addresses, streams, verify)
                    answer = bare.ports
                case ["join"]:
                    assert bare is not None
                    bare.join()
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    transport.close()


# -- the sender ----------------------------------------------------------------------------------------


class _Sender:
    def __init__(self, addresses: Sequence[str], seconds: float) -> None:
        self._addresses, self._seconds = addresses, seconds
        end = time.monotonic() + 30
        while True:
            try:
                self._control = socket.create_connection((addresses[0], CONTROL))
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(_AGAIN)
        self._lines = self._control.makefile("rw")
        own = [own_host(f"{address}:{CONTROL}") for address in addresses]
        self._transport, self._pids = _open(own)
        self._to = str(self._ask("address"))
        # No chunk is at the same place in two of three versions: what is there already is not sent again.
        self._memory: SharedMemory = snapshot_memory((_CHUNKS + _WARM) * CHUNK)
        data = self._memory.view
        for piece in _pieces(data):
            piece[:] = os.urandom(CHUNK)
        sums = [xxh3_64_intdigest(piece) for piece in _pieces(data)]
        self._data, self._sums = data, sums
        self._version = 0

    def _ask(self, *question: object) -> Any:
        self._lines.write(json.dumps(question) + "\n")
        self._lines.flush()
        return json.loads(self._lines.readline())

    def close(self) -> None:
        self._transport.close()
        self._lines.close()
        self._control.close()

    @contextmanager
    def _counted(self, pids: Sequence[int], found: dict[str, float]) -> Iterator[None]:
        """GB/s and CPU seconds for each GB of both ends, of the bytes that `found` has when it ends."""
        cpu, began = _cpu(pids) + self._ask("cpu"), time.monotonic()
        yield
        took = time.monotonic() - began
        gigabytes = found.pop("bytes") / 1e9
        found["gb_s"] = gigabytes / took
        found["cpu_s_per_gb"] = (_cpu(pids) + self._ask("cpu") - cpu) / gigabytes

    def bare(self, streams: int, verify: bool) -> dict[str, float]:
        """As many streams, from memory to memory."""
        ports = self._ask("bare", streams, verify)
        sockets = [
            socket.create_connection((self._addresses[n % len(self._addresses)], port))
            for n, port in enumerate(ports)
        ]
        for each in sockets:
            each.recv(1)
        pieces = list(_pieces(self._data[: max(1, _CHUNKS // streams) * CHUNK]))
        found: dict[str, float] = {}
        end = time.monotonic() + self._seconds

        def send(sock: socket.socket) -> int:
            sent = 0
            while time.monotonic() < end:
                for piece in pieces:
                    sock.sendall(piece)
                sent += len(pieces) * CHUNK
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
            sock.close()
            return sent

        with ThreadPoolExecutor(streams) as threads, self._counted([os.getpid()], found):
            found["bytes"] = sum(threads.map(send, sockets))
        self._ask("join")
        return found

    def transport(self, workers: int) -> dict[str, float]:
        """As many roles, each of which has its segment sent again and again."""
        chunks = _CHUNKS // workers
        items = [("w", "uint8", (chunks * CHUNK,), chunks * CHUNK)]
        segments = [layout((role,), items) for role in range(workers)]

        def push(segment: Segment, version: int) -> int:
            first = segment.holders[0] * chunks + version % (_WARM + 1)
            data = self._data[first * CHUNK : (first + chunks) * CHUNK]
            what = self._to, segment, version, data, self._sums[first : first + chunks]
            return self._transport.push(*what, epoch=0, gate=lambda: None, deadline=60)

        def all_push() -> int:
            self._version += 1
            return sum(threads.map(lambda segment: push(segment, self._version), segments))

        found: dict[str, float] = {}
        with ThreadPoolExecutor(workers) as threads:
            for _ in range(_WARM):
                all_push()
            with self._counted(self._pids, found):
                found["bytes"], end = 0, time.monotonic() + self._seconds
                while time.monotonic() < end:
                    found["bytes"] += all_push()
        return found


def send(
    workers: Sequence[int], seconds: float, times: int, addresses: Sequence[str]
) -> list[dict[str, Any]]:
    """All rows: what runs beside each other is measured by turns."""
    sender = _Sender(addresses, seconds)
    rows = []
    for count in workers:
        turns = []
        for _ in range(times):
            streams = count * len(addresses)
            turns.append((sender.bare(streams, False), sender.transport(count), sender.bare(streams, True)))
        rows.append({"interfaces": len(addresses), "workers": count, "turns": turns})
    sender.close()
    return rows


def main() -> None:
    """Entry."""
    match sys.argv[1:]:
        case ["serve", *addresses]:
            serve(addresses)
        case ["send", what, *addresses]:
            workers, seconds, times = json.loads(what)
            print(json.dumps(send(workers, seconds, times, addresses)), flush=True)


if __name__ == "__main__":
    main()

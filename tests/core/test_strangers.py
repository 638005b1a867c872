"""Who does not know the job's secret gets nothing, and keeps nobody out."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from core.copies import make, push
from harness import environment

from ft_core.comm.rendezvous import EpochStore, Stores
from ft_core.net.transport import TcpTransport
from ft_core.protocol import door, handshake
from ft_core.protocol.sockets import split_address
from ft_core.state.replicas import ReplicaStore

CROWDED = Path(__file__).with_name("crowded.py")
SECRET = b"transport test secret"
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

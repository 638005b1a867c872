"""Copies that went bad in memory are never loaded, and strangers are not listened to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import memory_of
import pytest
from harness import Job, Layout, check_clean, check_identical, check_survivors

from ft_core.errors import AuthenticationError
from ft_core.protocol.channel import Channel
from ft_core.protocol.handshake import Handshake
from ft_core.protocol.transfers import ANSWER

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 40
PATIENT = ("--ft-hang-after=300",)
"""Workers are stopped for a while here, and are to stay who they are."""


@contextmanager
def paused(job: Job, world: int) -> Iterator[int]:
    """Stop all workers within a step v + 1, when v - 1 and v are held by all and replicated. Yields v.

    In any other moment one of the two buffers of some role may be in the middle of being written, and if
    then the other is lost nothing is left: two buffers are what a role has.
    """
    workers = [job.pids(role)[1] for role in range(world)]
    for _ in range(100):
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        version = _settled(job)
        if version is not None:
            yield version
            break
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.03)
    else:
        raise AssertionError(f"never all at rest: {job.status()}")
    for pid in workers:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def _settled(job: Job) -> int | None:
    time.sleep(0.6)  # longer than a heartbeat, so that the status is of after the stop, as a rule
    rows = job.status()["roles"]
    held = [row["held"] for row in rows]
    held += [v for row in rows for s, found in row["replicas"].items() for v in found.values() if "x1-" in s]
    if any(versions != held[0] for versions in held) or len(held[0]) != 2:
        return None
    for row in rows:  # the heartbeat of a machine that stalls comes later than that
        if {snapshot.version for snapshot in memory_of.snapshots(row["agent_pid"])} != set(held[0]):
            return None
    return held[0][1]


def unique_bytes(job: Job, role: int, version: int) -> tuple[memory_of.Snapshot, int, bytes]:
    """A role's snapshot, and where in it, and what, a piece of its unique optimizer state is."""
    agent, _ = job.pids(role)
    other, _ = job.pids(1 - role)
    own = memory_of.snapshots(agent)
    snapshot = next(s for s in own if s.version == version)
    elsewhere = b"".join(s.data for s in [*own, *memory_of.snapshots(other)] if s.inode != snapshot.inode)
    for offset in range(memory_of.PAGE * 2, len(snapshot.data), 256):
        piece = snapshot.data[offset : offset + 64]
        if len(set(piece)) > 32 and snapshot.data.count(piece) == 1 and piece not in elsewhere:
            return snapshot, offset, piece
    raise AssertionError("no unique state found")


def test_a_replica_with_a_flipped_bit_is_refused_and_the_older_version_used(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED, ftrun=PATIENT) as job:
        job.wait_for_step(5)
        with paused(job, 2) as version:
            _, _, piece = unique_bytes(job, 0, version)
            assert memory_of.flip_in_anonymous_memory(job.pids(1)[0], piece) >= 1
            job.kill_nodes(0)
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    decided = [e["version"] for e in result.of("decided")[1:]]
    assert decided == [version, version - 1]
    refused = [e["reason"] for e in result.of("detected") if "does not match its checksum" in e["reason"]]
    assert len(refused) == 1 and "segment 0x1-" in refused[0] and "chunk 0" in refused[0]
    assert f"version {version}" in refused[0]
    assert f"version {version}, is corrupt and struck off" in result.output


def test_another_replica_serves_where_one_is_bad(tmp_path):
    layout = Layout(1, 1, 3, distributed=True, more=("--global-batch-size=6",))
    with Job(tmp_path / "job", layout, STEPS, script=PACED, ftrun=("--ft-replicas=2", *PATIENT)) as job:
        job.wait_for_step(5)
        with paused(job, 3) as version:
            _, _, piece = unique_bytes(job, 0, version)
            # Of the two that hold it, node1 is asked first: holders that were asked as often go by name.
            assert memory_of.flip_in_anonymous_memory(job.pids(1)[0], piece) >= 1
            job.kill_nodes(0)
        result = job.finish()
    check_identical(result, layout, STEPS)
    check_survivors(result, layout.world)
    assert [e["version"] for e in result.of("decided")[1:]] == [version]
    assert "is corrupt and struck off; another is used" in result.output


def test_a_local_snapshot_with_a_flipped_bit_is_refused_and_the_replica_used(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED, ftrun=PATIENT) as job:
        job.wait_for_step(5)
        with paused(job, 2) as version:
            snapshot, offset, _ = unique_bytes(job, 0, version)
            memory_of.flip_in_file(snapshot.path, offset)
            os.kill(job.pids(0)[1], signal.SIGKILL)
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    assert [e["version"] for e in result.of("decided")[1:]] == [version, version]
    refused = [e["reason"] for e in result.of("detected") if "does not match its checksum" in e["reason"]]
    assert len(refused) == 1
    assert f"version {version}: chunk 0 of segment 0x1-" in refused[0]


def test_strangers_are_refused_and_the_job_goes_on(tmp_path):
    steps = 3 * STEPS
    with Job(tmp_path / "job", LAYOUT, steps, script=PACED, ftrun=PATIENT) as job:
        job.wait_for("resumed")
        agent = job.pids(0)[0]
        controller = (job.job_dir / "controller").read_text().strip()
        listeners = [controller, f"unix:{memory_of.worker_socket(agent)}"]
        ports = memory_of.listening_ports(agent)
        assert [greeting(p) for p in ports] == [b"FTRN"] * 3, (
            "the data's and the epochs' stores, and where it takes those for which it speaks; nothing else"
        )
        listeners += [f"127.0.0.1:{port}" for port in ports]
        for address in listeners:
            with pytest.raises(AuthenticationError):
                Channel.connect(address, b"another job's secret", ANSWER, 60)
            garbage(address)
        job.wait_for("refused", 2)
        result = job.finish()
    check_identical(result, LAYOUT, steps)
    check_clean(result)
    assert result.recoveries == 0
    assert re.search(r"transport at \S+: \S+ does not know this job's secret", result.output)
    reasons = [e["reason"] for e in result.of("refused")]
    assert any("does not know this job's secret: connection refused" in r for r in reasons)
    assert any("does not speak this protocol" in r for r in reasons)


def greeting(port: int) -> bytes:
    """The first bytes that a server says to who begins as one of its protocol, if there is one."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        stranger.sendall(Handshake(b"another job's secret", "", b"", client=True).hello)
        return stranger.recv(4)
    return b""


def garbage(address: str) -> None:
    """Send bytes that are no handshake, as a port scanner would."""
    kind = socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET
    host, _, port = address.rpartition(":")
    with socket.socket(kind, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(60)
        stranger.connect(address.removeprefix("unix:") if kind == socket.AF_UNIX else (host, int(port)))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: training\r\n\r\n".ljust(200, b"x"))
        try:
            while stranger.recv(4096):
                pass
        except OSError:
            return  # closed in our face

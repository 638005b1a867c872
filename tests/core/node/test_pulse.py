"""The process beside an agent: it says that the machine lives; nothing of the agent's work holds it up."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from processes import alive
from waiting import wait_for_value

from ft_core.control.liveness.suspicion import NodeLiveness
from ft_core.control.pulse_listener import BATCH, heard
from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol.messages import Pulse
from ft_core.protocol.pulses import MAX_BYTES, Seal, receiver, sender
from ft_core.settings import Command, Settings

SECRET = b"a job's secret"
AGENT = f"""
import sys, time
from ft_core.node.link import pulse
loop = pulse.Loop()
loop.met(sys.argv[1], "1a")
print(pulse.start(loop, {SECRET!r}, "node0+1", 0.02), flush=True)
while True:
    loop.turned()
    time.sleep(0.005)
"""


@contextmanager
def agent(address: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process whose loop turns, and the pid of the one beside it."""
    command = [sys.executable, "-c", AGENT, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def stalled(datagrams: socket.socket) -> float:
    """What the next pulse says, which is of that session and higher than any before it."""
    pulse = Seal(SECRET).open(datagrams.recv(MAX_BYTES), "a node")
    assert (pulse.session, pulse.node) == ("1a", "node0+1")
    return pulse.stalled


def test_pulses_go_on_while_the_agent_is_stopped_and_say_for_how_long() -> None:
    with receiver("127.0.0.1", 0) as datagrams:
        datagrams.settimeout(60)
        port = datagrams.getsockname()[1]
        with agent(f"127.0.0.1:{port}") as (process, beside):
            while stalled(datagrams) > 0.5:
                pass
            os.kill(process.pid, signal.SIGSTOP)
            while stalled(datagrams) < 1.0:
                pass
            os.kill(process.pid, signal.SIGCONT)
            while stalled(datagrams) > 0.5:
                pass
            datagrams.close()  # the controller is restarted; meanwhile its machine says that nobody listens
            time.sleep(0.2)
            with receiver("127.0.0.1", port) as again:
                again.settimeout(60)
                stalled(again)
            assert alive(beside)
            process.kill()
            wait_for_value(lambda: alive(beside), False)


def test_a_datagram_that_was_altered_or_is_no_pulse_is_refused() -> None:
    seal, pulse = Seal(SECRET), Pulse("1a", "node0+1", 7, 0.5)
    whole = seal.pack(pulse)
    assert seal.open(whole, "a node") == pulse
    with pytest.raises(AuthenticationError, match="a datagram from a node"):
        Seal(b"another").open(whole, "a node")
    for at in range(len(whole)):
        with pytest.raises((AuthenticationError, ProtocolError)):
            seal.open(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "a node")
        with pytest.raises((AuthenticationError, ProtocolError)):
            seal.open(whole[:at], "a node")
    with pytest.raises(AuthenticationError):
        seal.open(whole + b" ", "a node")
    with pytest.raises(ProtocolError):
        seal.open(whole + bytes(MAX_BYTES), "a node")
    with pytest.raises(ProtocolError, match="over the limit"):
        seal.pack(Pulse("1a", "n" * MAX_BYTES, 7, 0.5))
    with pytest.raises(ValueError, match="secret"):
        Seal(b"")


def test_who_sends_more_than_can_be_read_holds_nothing_up() -> None:
    async def main() -> None:
        found: list[Pulse] = []
        refused: list[str] = []
        turns = 0
        with receiver("127.0.0.1", 0) as datagrams, heard(datagrams, SECRET, found.extend, refused.append):
            to = sender(f"127.0.0.1:{datagrams.getsockname()[1]}")
            seal = Seal(SECRET)
            for number in range(BATCH):
                to.send(seal.pack(Pulse("1a", "a", number, 0.0)))
                to.send(b"nonsense")
            while len(found) + len(refused) < 2 * BATCH:
                await asyncio.sleep(0)
                turns += 1
                assert len(found) + len(refused) <= turns * BATCH
            to.close()
        assert [pulse.number for pulse in found] == list(range(BATCH)) and len(refused) == BATCH

    asyncio.run(main())


def test_a_large_job_says_less_often_that_it_lives_and_never_so_seldom_as_to_be_suspected() -> None:
    def every(nodes: int, **more: Any) -> float:
        return Settings(nodes, 8, Command("train.py"), **more).pulse

    assert [every(nodes) for nodes in (1, 5000, 10_000, 12_500, 100_000)] == [0.5, 0.5, 1.0, 1.25, 1.25]
    assert every(100_000, heartbeats_missed=2) == 0.5
    sight, now = NodeLiveness(0.0), 0.0
    for number in range(40):
        now = number * 1.25
        if number % 3:  # every third is lost
            sight.pulse(now, number, 0.0)
        assert not sight.doubtful(now, 10.0)
    assert not sight.lost(now + 5.0, -math.inf, 10.0, False, [])

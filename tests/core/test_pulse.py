"""The process beside an agent: it says that the machine lives; nothing of the agent's work holds it up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from processes import alive
from waiting import wait_for_value

from ft_core.protocol.channel import Channel
from ft_core.protocol.messages import FROM_CLIENT, Pulse, PulseHello
from ft_core.protocol.sockets import listen

SECRET = b"a job's secret"
AGENT = f"""
import sys, time
from ft_core.node import pulse
loop = pulse.Loop()
loop.met(sys.argv[1])
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


def stalled(channel: Channel[object]) -> float:
    message = channel.recv()
    assert isinstance(message, Pulse)
    return message.stalled


def test_pulses_go_on_while_the_agent_is_stopped_and_say_for_how_long() -> None:
    with listen("127.0.0.1") as server, agent(f"127.0.0.1:{server.getsockname()[1]}") as (process, beside):
        channel = Channel.accept(server.accept()[0], SECRET, FROM_CLIENT)
        channel.settimeout(60)
        assert channel.recv() == PulseHello("node0+1")
        while stalled(channel) > 0.5:
            pass
        os.kill(process.pid, signal.SIGSTOP)
        while stalled(channel) < 1.0:
            pass
        os.kill(process.pid, signal.SIGCONT)
        while stalled(channel) > 0.5:
            pass
        channel.close()  # the controller is restarted
        channel = Channel.accept(server.accept()[0], SECRET, FROM_CLIENT)
        channel.settimeout(60)
        assert channel.recv() == PulseHello("node0+1")
        stalled(channel)
        assert alive(beside)
        process.kill()
        wait_for_value(lambda: alive(beside), False)
        channel.close()

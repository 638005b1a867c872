"""Whether a node can be reached from another: its agent answers, has ended, or says nothing."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ft_core.errors import FtError
from ft_core.net.transport import TcpTransport
from ft_core.node.link import probe
from ft_core.node.link.inquiries import Inquiries
from ft_core.node.link.pulse import Loop
from ft_core.protocol import messages as m
from ft_core.protocol.sockets import reserve
from ft_core.state.store import NodeStore

SECRET = b"a job's secret"


def test_an_agent_that_ends_lets_those_go_who_wait_for_a_worker_of_it() -> None:
    """Their threads wait for its event loop, which is to end with them."""
    store = NodeStore()
    inquiries = Inquiries("there", store, lambda: 0.0)

    async def test() -> None:
        asked = asyncio.Event()
        inquiries.open(lambda _: asked.set())
        waits = asyncio.create_task(asyncio.to_thread(inquiries.answer, m.AskProgress(0, 0)))
        await asked.wait()
        inquiries.close()
        with pytest.raises(FtError, match="node there is ending"):
            await waits
        with pytest.raises(FtError, match="node there is starting, or ending"):
            inquiries.answer(m.AskProgress(0, 0))

    asyncio.run(test())


def test_nodes_are_reached_refused_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE", 60.0)
    store = NodeStore()
    loop = Loop()
    inquiries = Inquiries("there", store, loop.stalled)
    there = TcpTransport(store, SECRET, answer=inquiries.answer)
    stranger = TcpTransport(store, b"another secret", answer=inquiries.answer)
    gone = reserve("127.0.0.1")  # bound, and nobody listens
    with gone, socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel takes connections for it
        silent = {"stopped": f"127.0.0.1:{stopped.getsockname()[1]}"}
        nodes = {"gone": f"127.0.0.1:{gone.getsockname()[1]}"}
        nodes |= {"there": there.address, "stranger": stranger.address}
        try:
            found = asyncio.run(probe.probe(nodes, SECRET, stalled=60))
            assert found == {
                "gone": "refused",
                "there": "reached",
                "stranger": "silent",
            }
            alone = {"there": there.address}
            assert asyncio.run(probe.probe(alone, SECRET, stalled=1e-9)) == {"there": "silent"}, (
                "a thread of it answers, and says that its event loop does not turn"
            )
            loop.turned()
            assert asyncio.run(probe.probe(alone, SECRET, stalled=60)) == {"there": "reached"}
            monkeypatch.setattr(probe, "PROBE", 0.5)
            assert asyncio.run(probe.probe(silent, SECRET, stalled=60)) == {"stopped": "silent"}
        finally:
            there.close()
            stranger.close()

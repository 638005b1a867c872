"""Whether other nodes can be reached from here: the controller asks about those that it does not hear."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.protocol import transfers as t
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.messages import ProbeResult

_BEST_FIRST: tuple[ProbeResult, ...] = ("reached", "refused")
PROBE = 2.0
"""Seconds that a node has to answer."""


async def probe(nodes: Mapping[str, str], secret: bytes, stalled: float) -> dict[str, ProbeResult]:
    """Look which nodes are reached, by name. `nodes`: addresses of their agents. One that has done nothing
    for `stalled` seconds does not count as reached, though a thread of it answers."""
    found = await asyncio.gather(*(_by_any_way(address, secret, stalled) for address in nodes.values()))
    return dict(zip(nodes, found, strict=True))


async def _by_any_way(address: str, secret: bytes, stalled: float) -> ProbeResult:
    """The best that one of an agent's interfaces answers."""
    found = await asyncio.gather(*(_probe(way, secret, stalled) for way in address.split(",")))
    return next((each for each in _BEST_FIRST if each in found), "silent")


async def _probe(address: str, secret: bytes, stalled: float) -> ProbeResult:
    try:
        async with asyncio.timeout(PROBE):
            channel = await AsyncChannel.connect(address, secret, t.ANSWER)
            try:
                channel.post(t.AskAlive())
                answer = await channel.recv()
            finally:
                channel.close()
    except ConnectionRefusedError:
        return "refused"
    except (OSError, AuthenticationError, ProtocolError):
        return "silent"
    return "reached" if isinstance(answer, t.Alive) and answer.stalled < stalled else "silent"

"""Brings a role's state to the node that is to play it: from other agents' memory, from copies that this one
keeps, or from storage."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.net.transport import TcpTransport
from ft_core.net.transport_server import chunk
from ft_core.protocol.messages import NodePlan
from ft_core.protocol.transfers import DescribeSegment, SegmentFound, StrikeCopy
from ft_core.settings import Settings
from ft_core.state import durable, threads
from ft_core.state.manifest import Segment
from ft_core.state.memory import SnapshotBuffer, copy_bytes
from ft_core.state.store import Found, NodeStore

_RUN = 8
"""Chunks that a thread copies one after the other."""
_ASK_DEADLINE = 10.0
_FETCH_DEADLINE = 600.0


def bring(
    role: int, plan: NodePlan, store: NodeStore, transport: TcpTransport, settings: Settings
) -> SnapshotBuffer:
    """Version `plan.version` of `role`, every chunk verified. `store`: all that is held here.

    Runs in a thread, which may still ask silent nodes when the plan is over: so the buffer is nobody's yet,
    and not the role's, in which a later plan's snapshots are. Raises FtError when no holder could give a
    good copy.
    """
    version = plan.version
    assert version is not None
    if plan.origin == "durable":
        segments, fill = durable.open_role(settings.durable_dir, plan.durable, role)
        buffer = SnapshotBuffer.create(segments, store.create)
        fill(buffer)
        buffer.version = version
        return buffer
    sources = plan.sources[role]
    here = {
        name: copy
        for name, nodes in sources.items()
        if any(node in plan.nodes and plan.nodes[node].data == transport.address for node in nodes)
        if (copy := store.find(name, version)) is not None
    }
    found = [
        (here[name][0], nodes) if name in here else _describe(name, version, nodes, plan, transport)
        for name, nodes in sources.items()
    ]
    found.sort(key=lambda pair: pair[0].holders)
    buffer = SnapshotBuffer.create([segment for segment, _ in found], store.create)
    for index, (segment, nodes) in enumerate(found):
        checksums = _copied(here[segment.id], buffer.data(index)) if segment.id in here else None
        if checksums is None:
            checksums = _fetch(segment, version, nodes, plan, transport, buffer.data(index))
        table = buffer.checksums(index)
        for number, value in enumerate(checksums):
            table[number] = value
    buffer.version = version
    return buffer


def _describe(
    name: str, version: int, nodes: list[str], plan: NodePlan, transport: TcpTransport
) -> tuple[Segment, list[str]]:
    """The layout of a segment, and those of `nodes` that may be asked for it, the one that answered first."""
    reasons = []
    for position, node in enumerate(nodes):
        try:
            question = DescribeSegment(name, version)
            answer = transport.request(plan.nodes[node].data, question, deadline=_ASK_DEADLINE)
            if not isinstance(answer, SegmentFound):
                raise TransportError(f"it answered {answer}")
            return Segment.of(answer.segment), nodes[position:]
        except (TransportError, KeyError) as error:
            reasons.append(f"{node}: {error}")
    raise TransportError(f"no holder gave segment {name}: {'; '.join(reasons)}")


def _copied(copy: Found, into: memoryview) -> Sequence[int] | None:
    """Copy a segment that is held here. Its checksums, or None if it does not match them: then it is found
    corrupt once more, and struck off, by who fetches it."""
    segment, data, checksums = copy
    bad = []

    def move(number: int) -> None:
        for index in range(number * _RUN, min((number + 1) * _RUN, segment.chunks)):
            part = chunk(into, index)
            copy_bytes(part, chunk(data, index))
            if xxh3_64_intdigest(part) != checksums[index]:  # while it is in the cache
                bad.append(index)

    threads.each(-(-segment.chunks // _RUN), move)
    return None if bad else checksums


def _fetch(
    segment: Segment,
    version: int,
    nodes: list[str],
    plan: NodePlan,
    transport: TcpTransport,
    into: memoryview,
) -> list[int]:
    """Read a segment from the first of `nodes` that has a good copy; a bad one is struck off there."""
    reasons: list[Exception] = []
    for node in nodes:
        address = plan.nodes[node].data
        try:
            _, checksums = transport.fetch(
                address, segment.id, version, allocate=lambda _: into, deadline=_FETCH_DEADLINE
            )
            return checksums
        except CorruptSnapshot as error:
            reasons.append(error)
            with contextlib.suppress(TransportError):  # then its node is gone, and the copy with it
                transport.request(address, StrikeCopy(segment.id, version), deadline=_ASK_DEADLINE)
        except TransportError as error:
            reasons.append(error)
    raise TransportError(f"no good copy of segment {segment.id}: {'; '.join(map(str, reasons))}")

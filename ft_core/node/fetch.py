"""Brings a role's state to the node that is to play it: from other agents' memory, or from storage."""

from __future__ import annotations

from ft_core.errors import CorruptSnapshot, TransportError
from ft_core.net.transport import TcpTransport
from ft_core.protocol.messages import NodePlan
from ft_core.protocol.transfers import DescribeSegment, SegmentFound, StrikeCopy
from ft_core.settings import Settings
from ft_core.state import durable
from ft_core.state.manifest import Segment
from ft_core.state.memory import SnapshotBuffer
from ft_core.state.store import RoleMemory

_ASK_DEADLINE = 10.0
_FETCH_DEADLINE = 600.0


def bring(
    role: int, plan: NodePlan, memory: RoleMemory, transport: TcpTransport, settings: Settings
) -> tuple[int, SnapshotBuffer]:
    """Have version `plan.worker.version` of `role` in a buffer of `memory`, every chunk verified.

    Runs in a thread. Raises FtError when no holder could give a good copy.
    """
    version, slot = plan.worker.version, memory.free_slot()
    assert version is not None
    if plan.worker.origin == "durable":
        segments, fill = durable.open_role(settings.durable_dir, plan.durable, role)
        buffer = memory.allocate(slot, segments)
        fill(buffer)
        buffer.version = version
        return slot, buffer
    sources = plan.sources[role]
    found = [_describe(name, version, nodes, plan, transport) for name, nodes in sources.items()]
    found.sort(key=lambda pair: pair[0].holders)
    buffer = memory.allocate(slot, [segment for segment, _ in found])
    for index, (segment, nodes) in enumerate(found):
        checksums = _fetch(segment, version, nodes, plan, transport, buffer.data(index))
        table = buffer.checksums(index)
        for chunk, value in enumerate(checksums):
            table[chunk] = value
    buffer.version = version
    return slot, buffer


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
            transport.request(address, StrikeCopy(segment.id, version), deadline=_ASK_DEADLINE)
        except TransportError as error:
            reasons.append(error)
    raise TransportError(f"no good copy of segment {segment.id}: {'; '.join(map(str, reasons))}")

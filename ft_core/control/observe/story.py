"""What the console is told of a job's events: a line for each failure, each recovery, each node that comes
or goes. The words are the events' own, so `events.jsonl` and the page say the same.

However many nodes fail at once, what is said of it is a screenful: of many each is in the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import PrintConsole, Record
from ft_core.control.observe.explain import some
from ft_core.control.phases import Forming, Phase, Rebuilding
from ft_core.protocol.goodput import Cause

FEW = 8
"""Failures that have a line each, of those that one recovery is from."""
TOGETHER = 5.0
"""Seconds within which nodes without roles that come, or go, have one line, but for the first."""

_WARNINGS = (
    *(
        "unprotected",
        "link",
        "straggler",
        "not_drained",
        "not_returning",
        "durable_failed",
        "durable_unused",
        "ledger",
        "begins_anew",
    ),
)
"""Events that ask for somebody's attention, though nothing has failed."""
_FAILURES = {"detected", "spare_lost", "waiting", "given_up", "drained"}
_NODES = {"joined": "joined, as spares", "spare_lost": "without a role are gone"}
"""Events of which there may be as many as nodes; and what has come to pass."""


@dataclass
class _Recovery:
    """What happens from the end of an epoch to the first step of another."""

    since: float
    event: str
    reason: str
    reached: int
    """The newest version that any role had."""
    failures: int = 0
    untold: list[str] = field(default_factory=list)
    """Failures that have no line."""
    moved: dict[int, str] = field(default_factory=dict)
    """Role -> its node now, of those that were lost."""
    version: int | None = None
    """The version that the job goes on from; None: as the script begins."""
    origin: str = ""


@dataclass
class _Nodes:
    """Nodes that one kind of event is about."""

    until: float = 0.0
    """When others may have a line."""
    waiting: list[str] = field(default_factory=list)


class Story:
    """What one controller tells of what happens."""

    def __init__(self) -> None:
        self._recovery: _Recovery | None = None
        self._nodes = {name: _Nodes() for name in _NODES}
        self._failed = False
        """Whether anything has: before, a spare that comes is what is expected."""

    def tell(
        self, records: Iterable[Record], cluster: ClusterState, phase: Phase, now: float, wall: float
    ) -> list[PrintConsole]:
        """What is to be said of these events, and of those that have waited for it."""
        said: list[PrintConsole] = []
        for record in records:
            level = "WARNING" if record.event in (*_WARNINGS, "detected") else "INFO"
            lines = self._lines(record, cluster, phase, now, wall)
            said += [PrintConsole(f"ftrun: {line}", level) for line in lines]
        for name, nodes in self._nodes.items():
            if nodes.waiting and now >= nodes.until:
                text = f"{len(nodes.waiting):,} nodes have {_NODES[name]}: {some(nodes.waiting)}"
                said.append(PrintConsole(f"ftrun: {text}"))
                nodes.waiting, nodes.until = [], now + TOGETHER
        return said

    def _lines(
        self, record: Record, cluster: ClusterState, phase: Phase, now: float, wall: float
    ) -> list[str]:
        reason, node = record.reason.partition("\n")[0], record.more.get("node", "")
        self._failed |= record.event in _FAILURES
        match record.event:
            case "detected" | "moving" | "returning" | "shrinking":
                return self._ended(record, reason, cluster, wall)
            case "decided":
                return self._decided(record, cluster)
            case "resumed":
                self._recovery = None
                return [reason] if reason else []
            case "joined" | "spare_lost" if self._failed and not isinstance(phase, Forming | Rebuilding):
                return self._of_node(record.event, node, reason, now)
            case "notice":
                left = f" in {record.more['seconds']:,.0f} s" if "seconds" in record.more else " soon"
                return [f"the machine of node {node} goes{left}: {reason}{_of(record.roles)}"]
            case "device":
                of = f"device {record.more['device']} of node {node}"
                return [f"{of if record.more['device'] != -1 else f'node {node}'}: {reason}"]
            case "straggler":
                return [reason]
            case "draining":
                return [f"node {node} is taken out ({reason}){_of(record.roles)}"]
            case "drained":
                return [f"node {node} is out: {reason}"]
            case "not_drained":
                return [f"node {node} is not taken out: {reason}"]
            case "left":
                return [f"replica groups {some(cluster.groups.of(record.roles))} are away; the others go on"]
            case "returned":
                return [f"replica groups {some(cluster.groups.of(record.roles))} are back"]
            case "not_returning":
                return [f"replica groups could not come back: {reason}"]
            case "durable_failed":
                version = record.more.get("version")
                return [f"the durable checkpoint of step {version:,} could not be written: {reason}"]
            case "controller_restarted":
                return [f"a new controller has taken over: {reason}"]
            case "unprotected" | "link" | "given_up" | "durable_unused" | "ledger" | "begins_anew":
                return [reason]
        return []

    def _ended(self, record: Record, reason: str, cluster: ClusterState, wall: float) -> list[str]:
        """An epoch has ended, or ends already."""
        if "spent" in record.more and self._recovery is None:
            noticing = record.more.get("unfinished", {}).get(Cause.DETECTION, 0.0)
            self._recovery = _Recovery(wall - noticing, record.event, reason, cluster.versions.newest_seen)
        if record.event != "detected":
            return []
        found = self._recovery
        if found is not None and "spent" in record.more:
            found.event = record.event
        what = reason if "role" in reason else f"{reason}{_of(record.roles)}"
        if found is not None:
            found.failures += 1
            if found.failures > FEW:
                found.untold.append(record.more.get("node") or reason)
                return []
        where = f" in step {cluster.versions.newest_seen + 1:,}" if cluster.versions.trained else ""
        return [f"failure{where}: {what}"]

    def _decided(self, record: Record, cluster: ClusterState) -> list[str]:
        found = self._recovery
        if found is None:
            return []
        found.moved |= record.more.get("moved", {})
        found.version, found.origin = record.more.get("version"), str(record.more.get("origin"))
        found.reached = max(found.reached, cluster.versions.newest_seen)
        untold, found.untold = found.untold, []
        many = "s" * (len(untold) != 1)
        return [f"{len(untold):,} further failure{many}: {some(untold)}"] if untold else []

    def _of_node(self, event: str, node: str, reason: str, now: float) -> list[str]:
        nodes = self._nodes[event]
        if nodes.waiting or now < nodes.until:
            nodes.waiting.append(node)
            return []
        nodes.until = now + TOGETHER
        return [
            f"node {node} has joined" if event == "joined" else f"a node without a role is gone: {reason}"
        ]

    def recovered(self, version: int, wall: float) -> str:
        """All roles have done a step again, and this many by now: how long that took, who plays what where,
        and what was lost. Empty where it is no recovery."""
        found = self._recovery
        if found is None or found.event in ("returning", "shrinking"):
            return ""
        took, moved = f"{wall - found.since:.1f} s", found.moved
        where = f"{_roles(sorted(moved))} on {some(sorted(set(moved.values())))}" if moved else ""
        if found.event == "moving":
            return f"{where}: moved within {took}, the others stood still meanwhile; at step {version:,}"
        source = _SOURCES.get(found.origin, found.origin)
        head = f"recovered after {took}: {where}{', ' * bool(where)}{source}"
        return f"{head}; at step {version:,}: {_lost(found.version, found.reached, found.origin)}"


_SOURCES = {
    "memory": "state from memory",
    "durable": "state from a durable checkpoint",
    "initial": "the script has begun again",
}


def _lost(version: int | None, reached: int, origin: str) -> str:
    if origin == "initial":
        return f"and what came after its own newest checkpoint is done again (step {reached:,} was reached)"
    if version is None or version >= reached:
        return "nothing was lost but the step under way"
    if version + 1 == reached:
        return f"step {reached:,}, which was lost, is done again"
    return f"steps {version + 1:,} to {reached:,}, which were lost, are done again"


def _of(roles: tuple[int, ...]) -> str:
    return f" ({_roles(roles)})" if roles else ""


def _roles(roles: Iterable[int]) -> str:
    found = list(roles)
    return f"role{'s' * (len(found) != 1)} {some(found)}"

"""The controller's answers to what `ftctl` asks: status, and the state of roles and nodes.

No message grows with the job: what is of all roles or nodes comes in pieces, each of which is asked for, so
that no answer holds up what else there is to do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeVar

from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import Effect, Peer, Send
from ft_core.control.phases import Phase
from ft_core.protocol import messages as m
from ft_core.protocol.domains import place, shared
from ft_core.protocol.groups import runs_of, text_of
from ft_core.protocol.table import pieces

Row = TypeVar("Row")

ROWS = 1024
"""The most rows of one message."""
SLOWEST = 4
"""How many of the slowest roles are named."""
ANSWER = 5.0
"""Seconds that an agent has to answer what `ftctl` asks of it."""


@dataclass
class Question:
    """A question about a role that its agent answers."""

    peer: Peer
    asked: m.DescribeRole | m.DescribeFlight
    node: str
    until: float


@dataclass
class Questions:
    """What `ftctl` has asked and an agent has yet to answer."""

    open: list[Question] = field(default_factory=list)
    _listed: dict[Peer, Iterator[m.Message]] = field(default_factory=dict)
    """What is left of the list that somebody reads."""

    def list_rows(self, cluster: ClusterState, peer: Peer, asked: m.AskRows, now: float) -> list[Effect]:
        """The first piece of the list that is asked for."""
        match asked.what:
            case "roles":
                self._listed[peer] = _in_pieces(m.RolesStatus, roles(cluster))
            case "spares":
                self._listed[peer] = _in_pieces(m.SparesStatus, spares(cluster))
            case _:
                self._listed[peer] = nodes(cluster, now, struck=asked.what == "struck")
        return self.more(peer)

    def more(self, peer: Peer) -> list[Effect]:
        """The next piece of the list that this peer reads."""
        piece = next(self._listed.get(peer, iter(())), None)
        if piece is None:
            return [Send(peer, m.Denied(error="there is no list of which there is more"))]
        return [Send(peer, piece)]

    def ask(
        self, cluster: ClusterState, peer: Peer, asked: m.DescribeRole | m.DescribeFlight, now: float
    ) -> list[Effect]:
        """Ask the agent of the role."""
        node = cluster.nodes.get(cluster.places.get(asked.role, ""))
        if node is None:
            return [Send(peer, m.Denied(error=f"role {asked.role} has no live node"))]
        self.open.append(Question(peer, asked, node.name, now + ANSWER))
        return [Send(node.peer, asked)]

    def on_role_state(self, cluster: ClusterState, state: m.RoleState) -> list[Effect]:
        """An agent has said what a role's state consists of."""
        answer = m.RoleDescribed(state=state, replicas=cluster.settings.replicas)
        return self._answered(m.DescribeRole(role=state.role), answer)

    def on_role_flight(self, record: m.RoleFlight) -> list[Effect]:
        """An agent has read a role's flight record."""
        return self._answered(m.DescribeFlight(role=record.role), record)

    def _answered(self, question: m.DescribeRole | m.DescribeFlight, answer: m.Message) -> list[Effect]:
        found = [each for each in self.open if each.asked == question]
        self.open = [each for each in self.open if each.asked != question]
        return [Send(each.peer, answer) for each in found]

    def tick(self, now: float) -> list[Effect]:
        """Deny what has not been answered in time: nobody waits for ever."""
        late = [question for question in self.open if now > question.until]
        self.open = [question for question in self.open if now <= question.until]
        return [
            Send(q.peer, m.Denied(error=f"node {q.node}, which plays role {q.asked.role}, does not answer"))
            for q in late
        ]

    def on_disconnected(self, peer: Peer) -> None:
        """Forget what a peer has asked that is gone."""
        self.open = [question for question in self.open if question.peer != peer]
        self._listed.pop(peer, None)


def hosts(cluster: ClusterState, peer: Peer) -> list[Effect]:
    """Where all roles are."""
    if cluster.plan is None:
        return [Send(peer, m.Denied(error="no role is anywhere yet"))]
    found = pieces(cluster.plan)
    return [Send(peer, m.HostsFollow(len(found))), *(Send(peer, piece) for piece in found)]


def nodes(cluster: ClusterState, now: float, struck: bool) -> Iterator[m.NodesStatus]:
    """The rows of live nodes, and of those that have left strikes behind. `struck`: only those with
    strikes."""
    known, limit = cluster.strikes, cluster.settings
    against = {where: known.against(where, now) for where in sorted(known.places())}
    avoided, here, about = known.avoided(now), set[str](), (limit.strikes, 60 * limit.strike_minutes)

    def there() -> Iterator[m.NodeStatus]:
        for name, node in list(cluster.nodes.items()):
            here.add(where := place(name))
            strikes = against.get(where, [])
            if strikes or not struck:
                yield m.NodeStatus(
                    name,
                    node.hello.domain,
                    alive=True,
                    roles=cluster.roles_by_node.get(name, []),
                    idle=node.idle,
                    strikes=strikes,
                    avoided=where in avoided,
                    draining=name in cluster.draining,
                )

    def gone() -> Iterator[m.NodeStatus]:
        for where, strikes in against.items():
            if strikes and where not in here:
                yield m.NodeStatus(
                    where, "", alive=False, roles=[], idle=0, strikes=strikes, avoided=where in avoided
                )

    return (m.NodesStatus(*about, rows, more) for rows, more in _pieces(chain(there(), gone())))


def roles(cluster: ClusterState) -> Iterator[m.RoleStatus]:
    """What there is of each role, and where it is."""
    left = iter(list(cluster.places.items()))
    while places := dict(islice(left, ROWS)):
        yield from _roles(cluster, places)


def _roles(cluster: ClusterState, places: Mapping[int, str]) -> Iterator[m.RoleStatus]:
    """The rows of some roles: all nodes are looked at for copies of what they have."""
    segments = {role: list(cluster.catalogue.of(role)) for role in places}
    silent = {
        f"{role}x1": role for role in places if not segments[role]
    }  # which have not said what they have
    copies: dict[str, dict[str, list[int]]] = {segment: {} for has in segments.values() for segment in has}
    for node in cluster.nodes.values():
        for segment, versions in node.replicas.items():
            if segment in copies:
                copies[segment][node.name] = versions
            elif silent and (role := silent.get(segment.partition("-")[0])) is not None:
                segments[role].append(segment)
                copies[segment] = {node.name: versions}
    for role, name in places.items():
        host = cluster.nodes.get(name)
        beat = host.beats.get(role) if host is not None else None
        yield m.RoleStatus(
            role=role,
            node=name,
            worker_pid=beat.pid if beat else None,
            agent_pid=host.hello.pid if host else None,
            step=beat.step if beat else None,
            tag=beat.tag if beat else None,
            held=beat.held if beat else [],
            replicas={segment: found for segment in segments[role] if (found := copies[segment])},
            committed=beat.committed if beat else None,
            waited_s=beat.waited_s if beat else None,
            h2h_bytes=beat.h2h_bytes if beat else None,
            h2h_snapshots=beat.h2h_snapshots if beat else None,
            ready=beat.ready if beat else None,
        )


def spares(cluster: ClusterState) -> Iterator[m.SpareStatus]:
    """The nodes without a role."""
    for node in list(cluster.nodes.values()):
        if node.name not in cluster.roles_by_node:
            yield m.SpareStatus(node.name, node.hello.pid, node.idle, list(node.guarding))


def status(cluster: ClusterState, phase: Phase, finished: set[int], pid: int, now: float) -> m.JobStatus:
    """The job's status in a few words, of whatever size the job is."""
    settings = cluster.settings
    missing: list[m.RoleNamed] = []
    slowest: list[tuple[int, float, int, str]] = []
    last: tuple[float, float] = math.inf, math.inf
    without, steps = 0, set[int]()
    for name, played in cluster.roles_by_node.items():
        beats = node.beats if (node := cluster.nodes.get(name)) is not None else {}
        for role in played:
            if (beat := beats.get(role)) is None:
                without += 1
                if len(missing) < m.NAMED:
                    missing.append(m.RoleNamed(role, name, None, None))
            else:
                steps.add(step := beat.step)
                if step <= last[0] and (step < last[0] or -beat.step_s < last[1]):
                    slowest = sorted([*slowest, (step, -beat.step_s, role, name)])[:SLOWEST]
                    last = slowest[-1][:2] if len(slowest) == SLOWEST else last
    domains: Counter[str] = Counter()
    ready = 0
    for node in cluster.spares():
        domains[shared(node.hello.domain)] += 1
        ready += node.idle >= settings.nproc_per_node
    struck = _struck(cluster, now)
    return m.JobStatus(
        epoch=cluster.epoch,
        phase=phase.name,
        controller_pid=pid,
        finished=text_of(runs_of(finished)),
        roles=len(cluster.places),
        world_size=settings.world_size,
        missing=without,
        missing_roles=missing,
        oldest=min(steps, default=None),
        newest=max(steps, default=None),
        slowest=[m.RoleNamed(role, name, step, -long) for step, long, role, name in slowest],
        nodes=len(cluster.nodes_with_roles()),
        nodes_expected=settings.nnodes,
        spares=domains.total(),
        spares_ready=ready,
        spare_domains=len(domains),
        most_spares=[m.DomainSpares(*found) for found in domains.most_common(m.NAMED)],
        strikes=sum(each.strikes for each in struck),
        limit=settings.strikes,
        struck=len(struck),
        most_struck=struck[: m.NAMED],
        draining=cluster.draining[: m.NAMED],
        every=cluster.period,
    )


def _struck(cluster: ClusterState, now: float) -> list[m.Struck]:
    """Places with strikes, the most first."""
    avoided = cluster.strikes.avoided(now)
    found = [
        m.Struck(where, len(cluster.strikes.against(where, now)), where in avoided)
        for where in sorted(cluster.strikes.places())
    ]
    return sorted((each for each in found if each.strikes), key=lambda each: -each.strikes)


def _pieces(rows: Iterable[Row]) -> Iterator[tuple[list[Row], bool]]:
    """`ROWS` at a time, and whether there are more; at least one piece."""
    left = iter(rows)
    piece = list(islice(left, ROWS))
    while True:
        rest = list(islice(left, ROWS))
        yield piece, bool(rest)
        if not (piece := rest):
            return


def _in_pieces(kind: Callable[[list[Row], bool], m.Message], rows: Iterable[Row]) -> Iterator[m.Message]:
    return (kind(piece, more) for piece, more in _pieces(rows))

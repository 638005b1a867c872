"""The controller's answers to `ftctl`: status, state of a role, injected failures."""

from __future__ import annotations

from dataclasses import dataclass, field

from ft_core.control.events import Effect, Peer, Record, Send
from ft_core.control.facts import Facts
from ft_core.control.phases import Phase
from ft_core.control.strikes import place
from ft_core.protocol.messages import (
    Denied,
    DescribeFlight,
    DescribeRole,
    Forgiven,
    Inject,
    Injected,
    JobStatus,
    KillWorker,
    Message,
    NodesStatus,
    NodeStatus,
    RoleDescribed,
    RoleFlight,
    RoleState,
    RoleStatus,
    SpareStatus,
)
from ft_core.protocol.table import hosts_of

ANSWER = 5.0
"""Seconds that an agent has to answer what `ftctl` asks of it."""


@dataclass
class Question:
    """About a role: its agent knows."""

    peer: Peer
    asked: DescribeRole | DescribeFlight
    node: str
    until: float


@dataclass
class Questions:
    """Of `ftctl`, that an agent has yet to answer."""

    open: list[Question] = field(default_factory=list)

    def ask(self, facts: Facts, peer: Peer, asked: DescribeRole | DescribeFlight, now: float) -> list[Effect]:
        """Ask the agent of the role."""
        node = facts.nodes.get(facts.places.get(asked.role, ""))
        if node is None:
            return [Send(peer, Denied(error=f"role {asked.role} has no live node"))]
        self.open.append(Question(peer, asked, node.name, now + ANSWER))
        return [Send(node.peer, asked)]

    def described(self, facts: Facts, state: RoleState) -> list[Effect]:
        """An agent has said what a role's state consists of."""
        about, replicas = facts.begun, facts.settings.replicas
        hosts = list(hosts_of(about.roles, about.nodes).values())
        answer = RoleDescribed(state=state, hosts=hosts, replicas=replicas)
        return self._answered(DescribeRole(role=state.role), answer)

    def flight(self, record: RoleFlight) -> list[Effect]:
        """An agent has read a role's flight record."""
        return self._answered(DescribeFlight(role=record.role), record)

    def _answered(self, question: DescribeRole | DescribeFlight, answer: Message) -> list[Effect]:
        found = [each for each in self.open if each.asked == question]
        self.open = [each for each in self.open if each.asked != question]
        return [Send(each.peer, answer) for each in found]

    def tick(self, now: float) -> list[Effect]:
        """Nobody waits for ever."""
        late = [question for question in self.open if now > question.until]
        self.open = [question for question in self.open if now <= question.until]
        return [
            Send(q.peer, Denied(error=f"node {q.node}, which plays role {q.asked.role}, does not answer"))
            for q in late
        ]

    def disconnected(self, peer: Peer) -> None:
        """Who has asked is gone."""
        self.open = [question for question in self.open if question.peer != peer]


def inject(facts: Facts, peer: Peer, asked: Inject) -> list[Effect]:
    """Kill a role's worker, or a whole node."""
    role = asked.role
    node = facts.nodes.get(facts.places.get(role, "") if role is not None else asked.node or "")
    if node is None:
        victim = role if role is not None else asked.node
        return [Send(peer, Denied(error=f"no such role or node: {victim}"))]
    what = f"node {node.name}" if role is None else f"role {role}"
    return [
        Record("injected", facts.epoch, f"ftctl kill {what}"),
        Send(node.peer, KillWorker(role=role)),
        Send(peer, Injected(killed=node.name if role is None else role)),
    ]


def nodes(facts: Facts, now: float) -> NodesStatus:
    """All that are there, and those of which something is known."""
    known, limit = facts.strikes, facts.settings
    avoided, rows, here = known.avoided(now), [], set()
    for name, node in facts.nodes.items():
        here.add(where := place(name))
        roles = facts.hosts.get(name, [])
        about = known.against(where, now), where in avoided
        rows.append(NodeStatus(name, node.hello.domain, True, roles, node.idle, *about))
    for where in sorted(known.places() - here):
        if against := known.against(where, now):
            rows.append(NodeStatus(where, "", False, [], 0, against, where in avoided))
    return NodesStatus(limit.strikes, 60 * limit.strike_minutes, rows)


def forgive(facts: Facts, peer: Peer, node: str, now: float) -> list[Effect]:
    """Forget what counts against a node."""
    where = place(node)
    if where not in facts.strikes.places() | {place(name) for name in facts.nodes}:
        return [Send(peer, Denied(error=f"no such node: {node}"))]
    count = facts.strikes.forgive(where, now)
    return [
        Record(
            "forgiven", facts.epoch, f"ftctl nodes forgive {where}: {count} strikes", more={"node": where}
        ),
        Send(peer, Forgiven(where, count)),
    ]


def status(facts: Facts, phase: Phase, finished: set[int], pid: int) -> JobStatus:
    """What there is, and where it is."""
    copies: dict[str, dict[str, list[int]]] = {}
    for node in facts.nodes.values():
        for segment, versions in node.replicas.items():
            copies.setdefault(segment, {})[node.name] = versions
    rows = []
    for role, name in facts.places.items():
        host = facts.nodes.get(name)
        beat = host.beats.get(role) if host is not None else None
        segments = facts.catalogue.get(role, {})
        kept = {s: held for s, held in copies.items() if s in segments or s.startswith(f"{role}x1-")}
        rows.append(
            RoleStatus(
                role=role,
                node=name,
                worker_pid=beat.pid if beat else None,
                agent_pid=host.hello.pid if host else None,
                step=beat.step if beat else None,
                tag=beat.tag if beat else None,
                held=beat.held if beat else [],
                replicas=kept,
                committed=beat.committed if beat else None,
                waited_s=beat.waited_s if beat else None,
                h2h_bytes=beat.h2h_bytes if beat else None,
                h2h_snapshots=beat.h2h_snapshots if beat else None,
            )
        )
    spares = [
        SpareStatus(node=node.name, agent_pid=node.hello.pid, idle=node.idle)
        for node in facts.nodes.values()
        if node.name not in facts.hosts
    ]
    return JobStatus(
        epoch=facts.epoch,
        phase=phase.name,
        controller_pid=pid,
        finished=sorted(finished),
        roles=rows,
        spares=spares,
    )

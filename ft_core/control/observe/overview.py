"""What the page shows of nodes and roles. What is known is gathered in the controller's event loop, by
reference; what is sent to browsers is made of it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.risk import ClusterHoldings, Present, present
from ft_core.control.observe.job_metrics import Numbers
from ft_core.protocol.domains import place
from ft_core.protocol.goodput import Cause
from ft_core.protocol.groups import runs_of, text_of
from ft_core.protocol.messages import NAMED, RoleBeat

State = Literal["well", "behind", "missing", "lost", "spare", "starting"]
"""How a node gets on: `behind`, some role of it has done fewer steps than others have; `missing`: of one
nothing is heard; `lost`: it is not there, and has roles by the plan; `starting`: it has neither roles nor
idle workers.
"""


class Node(NamedTuple):
    """A node as the page has it."""

    domain: str
    state: State
    roles: str
    """The node's roles, as runs such as `0-3,8`."""
    marks: str
    """One for each role: `.` it is as far as the others, `b` behind, `m` not heard of, `f` finished."""
    step: int
    """The step of its slowest role; -1: none."""
    idle: int
    strikes: int
    avoided: bool
    draining: bool


@dataclass(frozen=True)
class Overview:
    """The job at one moment. None of it changes."""

    numbers: Numbers
    nodes: list[Present]
    idle: list[int]
    """How many workers without a role each of these nodes has."""
    gone: Mapping[str, str]
    """Nodes with roles that are not there, and their domains."""
    hosts: Mapping[str, list[int]]
    """Node -> its roles."""
    finished: frozenset[int]
    suspects: tuple[int, ...]
    """Roles that others wait for longer than usual."""
    struck: Mapping[str, tuple[int, bool]]
    """Place -> how many strikes count against it, and whether it is avoided."""
    strikes: int
    """How many strikes make a node one to be avoided."""
    world: int
    nproc: int
    policy: str
    replicas: int
    draining: tuple[str, ...]
    """Nodes that are being taken out."""
    slack: int
    """Steps that roles may differ by in what is heard of them, as it is not of one moment."""

    @property
    def held(self) -> ClusterHoldings | None:
        """Who has what of the state."""
        return self.numbers.held

    @property
    def newest(self) -> int:
        """The most steps that any role has done; -1: none is heard of."""
        return max((beat.step for node in self.nodes for beat in node.roles.values()), default=-1)

    @property
    def goodput(self) -> float | None:
        """The share of the job's time that went to steps that count; None: there was no time yet."""
        whole = sum(self.numbers.seconds.values())
        return self.numbers.seconds[Cause.PRODUCTIVE] / whole if whole else None

    @property
    def step_s(self) -> float | None:
        """Seconds of the fastest role's last step; None: there is none."""
        return min((beat.step_s for node in self.nodes for beat in node.roles.values()), default=None)

    def rows(self) -> dict[str, Node]:
        """The rows of all nodes, by name."""
        newest = self.newest
        beats = dict(zip((node.name for node in self.nodes), self.nodes, strict=True))
        idle = dict(zip(beats, self.idle, strict=True))
        found = {}
        least = newest - self.slack
        for name in sorted({*beats, *self.gone}):
            roles = self.hosts.get(name, [])
            heard = beats[name].roles if name in beats else {}
            marks = "".join([self._mark(role, heard.get(role), least) for role in roles])
            strikes, avoided = self.struck.get(place(name), (0, False)) if self.struck else (0, False)
            domain = beats[name].domain if name in beats else self.gone[name]
            step = min([heard[role].step for role in roles if role in heard], default=-1)
            state = _state(name in beats, marks, idle.get(name, 0))
            found[name] = Node(
                *(domain, state, _text(tuple(roles)), marks, step, idle.get(name, 0), strikes, avoided),
                draining=name in self.draining,
            )
        return found

    def _mark(self, role: int, beat: RoleBeat | None, least: int) -> str:
        if role in self.finished:
            return "f"
        if beat is None:
            return "m"
        return "b" if beat.step < least else "."

    def job(self) -> dict[str, Any]:
        """What the page says of the job as a whole."""
        numbers = self.numbers
        return {
            "phase": numbers.phase,
            "complaint": numbers.standing.complaint,
            "unprotected": numbers.unprotected,
            "epoch": numbers.epoch,
            "step": numbers.step,
            "world": self.world,
            "roles": sum(map(len, self.hosts.values())),
            "finished": len(self.finished),
            "spares": numbers.spares,
            "groups": numbers.groups,
            "suspects": [
                (role, node)
                for node, roles in (self.hosts.items() if self.suspects else ())
                for role in roles
                if role in self.suspects
            ][:NAMED],
            "suspected": len(self.suspects),
            "stragglers": [(each.role, each.node, each.score, each.part) for each in numbers.stragglers],
            "below": self.held.below if self.held is not None else None,
            "durable": numbers.durable,
            "redone": numbers.steps_redone,
            "recoveries": sum(numbers.recoveries.values()),
            "goodput": self.goodput,
            "seconds": {str(cause): round(seconds, 2) for cause, seconds in numbers.seconds.items()},
            "policy": self.policy,
            "replicas": self.replicas,
            "every": numbers.every,
            "strikes": self.strikes,
        }

    def has_node(self, name: str) -> bool:
        """Whether the node is there."""
        return any(node.name == name for node in self.nodes)

    def has_role(self, role: int) -> bool:
        """Whether some node plays the role."""
        return any(role in roles for roles in self.hosts.values())

    def node(self, name: str) -> dict[str, Any] | None:
        """All that is known of one: its roles, who has copies for them, and what would be lost with it."""
        here = next((node for node in self.nodes if node.name == name), None)
        if here is None and name not in self.gone:
            return None
        roles = self.hosts.get(name, [])
        heard = here.roles if here is not None else {}
        catalogue = self.held.catalogue if self.held is not None else {}
        copies: dict[str, dict[str, list[int]]] = {s: {} for role in roles for s in catalogue.get(role, {})}
        for other in self.nodes:
            for segment in copies.keys() & other.replicas.keys():
                copies[segment][other.name] = other.replicas[segment]
        return {
            "name": name,
            "here": here is not None,
            "roles": [
                {
                    "role": role,
                    "beat": msgspec.to_builtins(heard[role]) if role in heard else None,
                    "finished": role in self.finished,
                    "copies": {segment: copies[segment] for segment in catalogue.get(role, {})},
                }
                for role in roles
            ],
            "keeps": {s: list(versions) for s, versions in here.replicas.items()} if here is not None else {},
            "loss": self.loss(name),
            "draining": name in self.draining,
        }

    def drain(self, name: str) -> dict[str, Any]:
        """What it would take to take that node out: roles that move, and workers for them on others."""
        free = (
            min(idle, self.nproc - len(self.hosts.get(other.name, ())))
            for other, idle in zip(self.nodes, self.idle, strict=True)
            if other.name != name and other.name not in self.draining
        )
        return {"roles": len(self.hosts.get(name, ())), "room": sum(max(0, count) for count in free)}

    def loss(self, name: str) -> dict[str, Any] | None:
        """What would be lost if that node died now; None while it is not known who has what."""
        if self.held is None:
            return None
        found = self.held.without(name)
        ready = sum(
            idle >= self.nproc and other.name != name and other.name not in self.hosts
            for other, idle in zip(self.nodes, self.idle, strict=True)
        )
        return {**msgspec.to_builtins(found), "ready": ready, "policy": self.policy}


@lru_cache(maxsize=1 << 14)
def _text(roles: tuple[int, ...]) -> str:
    """Roles as runs, kept: those of a node hardly ever change."""
    return text_of(runs_of(roles))


def _state(here: bool, marks: str, idle: int) -> State:
    if not marks:
        return "spare" if idle else "starting"
    if not here:
        return "lost"
    return "missing" if "m" in marks else "behind" if "b" in marks else "well"


def overview(
    cluster: ClusterState,
    numbers: Numbers,
    finished: set[int],
    suspects: tuple[int, ...],
    step: float,
    now: float,
) -> Overview:
    """The overview of now. `step`: seconds that one takes."""
    settings, strikes = cluster.settings, cluster.strikes
    avoided = strikes.avoided(now)
    plan = cluster.plan
    return Overview(
        numbers,
        numbers.held.nodes if numbers.held is not None else present(cluster),
        [node.idle for node in cluster.nodes.values()],
        {
            name: plan.nodes[name].domain if plan is not None and name in plan.nodes else ""
            for name in cluster.roles_by_node
            if name not in cluster.nodes
        },
        cluster.roles_by_node,
        frozenset(finished),
        suspects,
        {where: (len(strikes.against(where, now)), where in avoided) for where in strikes.places()},
        settings.strikes,
        settings.world_size,
        settings.nproc_per_node,
        settings.policy,
        settings.replicas,
        tuple(cluster.draining),
        2 + int(2 * settings.pulse / max(step, 1e-3)),
    )

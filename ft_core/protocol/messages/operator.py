"""From `ftctl`, or the page, to the controller, and its answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ft_core.protocol.groups import RUNS
from ft_core.protocol.messages.agent import DescribeFlight, DescribeRole, Hosts, RoleFlight, RoleState
from ft_core.protocol.messages.values import (
    Epoch,
    FailureRecord,
    JobId,
    Message,
    NodeName,
    Number,
    Role,
    SegmentId,
    Value,
    Version,
)

# -- `ftctl` to the controller, and its answers --------------------------------------------------------


class CtlHello(Message, frozen=True):
    """`ftctl` greets; its questions follow. `DescribeRole` and `DescribeFlight` are among them. `job`: of
    which it asks; empty: of any."""

    job: JobId


class AskStatus(Message, frozen=True):
    """What the job is doing, in a few words however large it is."""


class AskRows(Message, frozen=True):
    """A list of one row for each role, spare, or node; of nodes also those alone against which something
    counts. It comes in pieces, each asked for by itself: `AskMore` for those after the first."""

    what: Literal["roles", "spares", "nodes", "struck"]


class AskMore(Message, frozen=True):
    """The next piece."""


class Inject(Message, frozen=True):
    """SIGKILL to the worker of a role, or to a whole node."""

    role: Role | None = None
    node: NodeName | None = None


class AskHosts(Message, frozen=True):
    """Where all roles are. Answered by `HostsFollow`, and then by so many `Hosts`."""


class Forgive(Message, frozen=True):
    """Forget what was counted against a node."""

    node: NodeName


class DrainNode(Message, frozen=True):
    """Take a node out: its roles move, and then it ends."""

    node: NodeName


class RoleStatus(Value, frozen=True):
    """The status of a role: None where nothing is known of its worker."""

    role: Role
    node: NodeName
    worker_pid: Number | None
    agent_pid: Number | None
    step: Version | None
    tag: Number | None
    held: list[Version]
    replicas: dict[SegmentId, dict[NodeName, list[Version]]]
    committed: Version | None
    waited_s: float | None
    h2h_bytes: Number | None
    h2h_snapshots: Number | None
    ready: Number | None = None
    """The pid of a standby that has started the role, as of `RoleBeat.ready`."""


class SpareStatus(Value, frozen=True):
    """The status of a node without a role."""

    node: NodeName
    agent_pid: Number
    idle: Number
    guarding: list[Role] = []


class RoleNamed(Value, frozen=True):
    """A role that is named in a summary. `step`: that it has done, and `step_s`: how long the last one took;
    None where nothing is known of its worker."""

    role: Role
    node: NodeName
    step: Version | None
    step_s: float | None


class DomainSpares(Value, frozen=True):
    """A failure domain with spares."""

    domain: str
    spares: Number


class Struck(Value, frozen=True):
    """A node against which something counts: how many strikes, and whether it is avoided."""

    node: NodeName
    strikes: Number
    avoided: bool


class SlowRole(Value, frozen=True):
    """A role that is named as slow: by how many times its usual time, and in which part of its step."""

    role: Role
    node: NodeName
    part: Annotated[str, Meta(max_length=16)]
    score: float


class JobStatus(Message, frozen=True):
    """Answers `AskStatus`. Lists have the first `NAMED` of what they are about."""

    epoch: Epoch
    phase: str
    controller_pid: Number
    finished: Annotated[str, Meta(pattern=rf"^({RUNS})?\Z")]
    """Roles whose script has come to its end."""
    roles: Number
    """The roles of the plan; others, of the `world_size`, are away."""
    world_size: Number
    missing: Number
    """Roles of the plan without a worker that is heard of."""
    missing_roles: list[RoleNamed]
    oldest: Version | None
    newest: Version | None
    """The steps that roles have done, at least and at most."""
    slowest: list[RoleNamed]
    """The roles that have done the fewest steps; of those that have done as many, the ones with the
    longest."""
    nodes: Number
    """With roles, and there."""
    nodes_expected: Number
    spares: Number
    spares_ready: Number
    """Spares with as many idle workers as a node has roles."""
    spare_domains: Number
    most_spares: list[DomainSpares]
    strikes: Number
    """Strikes that count, against all nodes."""
    limit: Number
    struck: Number
    """Nodes against which any count."""
    most_struck: list[Struck]
    draining: list[NodeName]
    """Nodes that are being taken out, in that order."""
    seconds: dict[str, float] = {}
    """What the job's time went to, by `Cause`."""
    every: Number = 1
    """Steps from a protected version to the next."""
    complaint: str = ""
    """Why the job does not get on, if so."""
    unprotected: str = ""
    """Why it is not protected, if so."""
    slow: list[SlowRole] = []
    """Roles that hold the others up."""


class RolesStatus(Message, frozen=True):
    """Answers `AskRows`. `more`: there are more."""

    roles: list[RoleStatus]
    more: bool


class SparesStatus(Message, frozen=True):
    """A piece of the list of spares, as `RolesStatus` is of that of roles."""

    spares: list[SpareStatus]
    more: bool


class NodeStatus(Value, frozen=True):
    """The status of a node that is there, or that is not and has a record. `strikes`: what counts against it;
    `avoided`: that is as many as the limit, so it is not used while there is another."""

    node: NodeName
    domain: str
    alive: bool
    roles: list[Role]
    idle: Number
    strikes: list[FailureRecord]
    avoided: bool
    draining: bool = False
    """Whether the node is being taken out."""


class NodesStatus(Message, frozen=True):
    """A piece of the list of nodes, as `RolesStatus` is of that of roles. `limit`: strikes within
    `seconds`."""

    limit: Number
    seconds: float
    nodes: list[NodeStatus]
    more: bool


class Forgiven(Message, frozen=True):
    """Answers `Forgive`: how many strikes are forgotten."""

    node: NodeName
    strikes: Number


class Drains(Message, frozen=True):
    """Answers `DrainNode`: so many roles of that node are to move, after those of the nodes `before` it."""

    node: NodeName
    roles: Number
    before: list[NodeName]


class Injected(Message, frozen=True):
    """Answers `Inject`: the role or node that is told to die."""

    killed: Role | NodeName


class RoleDescribed(Message, frozen=True):
    """Answers `DescribeRole`: what its agent says. `replicas`: how many copies of what is unique are kept."""

    state: RoleState
    replicas: Number


class HostsFollow(Message, frozen=True):
    """Answers `AskHosts`."""

    pieces: Number


class Denied(Message, frozen=True):
    """A question that cannot be answered, and why."""

    error: str


NAMED = 16
"""How many are named of what there is too much of to be listed."""

FromCtl = (
    CtlHello | AskStatus | AskRows | AskMore | AskHosts | Inject | DescribeRole | DescribeFlight | Forgive
    | DrainNode
)  # fmt: skip
ToCtl = (
    JobStatus | RolesStatus | SparesStatus | NodesStatus | HostsFollow | Hosts | Injected | RoleDescribed
    | RoleFlight | Forgiven | Drains | Denied
)  # fmt: skip

"""One node of the job, as its agent tells of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ft_core.control.decide.inventory import NodeInventory
from ft_core.control.events import Effect, Peer, Send
from ft_core.control.liveness.suspicion import NodeLiveness
from ft_core.protocol.messages import (
    AgentHello,
    Heartbeat,
    Host,
    Message,
    NodeAddress,
    RoleBeat,
    Timing,
)


def epoch_of(plan: str) -> int:
    """The epoch of a plan's id; 0 of none."""
    return int(plan.partition("-")[0] or 0)


@dataclass
class Check:
    """What is known of a node's own check (`control.admission`)."""

    asked_at: float
    under_way: bool = True
    times: Mapping[str, Timing] = field(default_factory=dict)
    hardware: str = ""
    """Empty until it has ended well."""
    why: str = ""
    """What is wrong with the node."""
    was_slow: bool = False
    """Whether it was slow when it was measured last, and is measured once more for that."""


@dataclass
class Node:
    """A live agent. No other process has had its name: it stands for all that the process holds."""

    peer: Peer
    hello: AgentHello
    liveness: NodeLiveness
    holdings: NodeInventory
    waiting: int
    """Workers that wait for a role, as it has said last."""
    applied_plan: str
    """The plan that it has begun, by its newest word, be that a report or a heartbeat: `holdings.begun` is
    that of its newest report, `greeted_with` that of its greeting."""
    messages_before_plan: list[Message]
    """What was said before it could be understood."""
    beats: Mapping[int, RoleBeat] = field(default_factory=dict)
    counted: Mapping[int, RoleBeat] = field(default_factory=dict)
    """What it has said last of its roles, over whichever connection: their counters go on."""
    replicas: Mapping[str, list[int]] = field(default_factory=dict)
    guarding: Sequence[int] = ()
    """Roles of other nodes that it has started ahead of need."""
    plan_sent_at: float = float("-inf")
    """When a plan was sent over this connection last."""
    hosts: list[Host] = field(default_factory=list)
    """What it has said of who is where, before it says what it keeps."""
    check: Check | None = None
    """Whether it is well; None: nobody has asked for that."""

    @classmethod
    def of(cls, peer: Peer, hello: AgentHello, now: float) -> Node:
        """The node that greets at `now`, by its greeting."""
        held = NodeInventory(hello)
        return cls(peer, hello, NodeLiveness(now), held, held.idle, held.begun, list(hello.said))

    @property
    def idle(self) -> int:
        """Workers that may be given a role: none until its check is over."""
        return 0 if self.under_check else self.waiting

    @property
    def under_check(self) -> bool:
        """Whether it is not known yet that it is well."""
        return self.check is not None and self.check.under_way

    @property
    def name(self) -> str:
        """The node's name, which no other node of the job has, nor will have."""
        return self.hello.node

    @property
    def greeted_with(self) -> str:
        """The plan that it had when it greeted."""
        return self.hello.holdings.begun

    @cached_property
    def address(self) -> NodeAddress:
        """Where others reach its memory, as plans say it."""
        return NodeAddress(data=self.hello.data, domain=self.hello.domain)

    def beat(self, beat: Heartbeat) -> None:
        """Take in the node's heartbeat: how far its roles are."""
        self.waiting, self.applied_plan, self.beats, self.replicas = (
            beat.idle,
            beat.begun,
            beat.roles,
            beat.replicas,
        )
        self.guarding, self.counted = beat.guarding, beat.roles


def sends_to(nodes: Iterable[Node], message: Message) -> list[Effect]:
    """The effects that send one message to each of these nodes."""
    return [Send(node.peer, message) for node in nodes]

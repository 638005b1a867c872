"""Starts roles while the others train (FT-HSDP, sections 4.3 and 5): the controller's part. They are those of
replica groups that come back, or those of a node that is drained, which train on there until then.

What takes long for a newcomer is to start: the script, the model, the record of start-up to replay. It does
all that ahead of the epoch in which it takes part, without anybody waiting for it. That epoch begins once
all of them are ready for their state, between two steps of the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ft_core.control.cluster.node import Node, sends_to
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.groups import Places, by_node
from ft_core.control.decide.plans import prepare
from ft_core.control.decide.records import completed
from ft_core.control.events import Effect, Record, Send
from ft_core.control.prestart.stop import Stop, release
from ft_core.protocol.messages import (
    Counts,
    OperationCounts,
    Prepare,
    RoleBeat,
    SendCounts,
    Withdraw,
)

log = logging.getLogger(__name__)

STANDBY_GRACE = 20.0
"""Seconds that a healthy node has to bring up another standby, before it is gone on without."""
ATTEMPTS = 3
"""Starts of a group in a row that may fail before the job goes on without it until a node joins."""
PAUSE, LONGEST_PAUSE = 5.0, 600.0
"""Seconds until the next attempt after groups came back and the epoch ended before a step did: where a link
stays broken, or a node fails at once, the others are to train in between. Doubled each time in a row."""


@dataclass
class PrestartAttempt:
    """One attempt to start roles ahead of need: those of replica groups that are away, or of a node that is
    drained."""

    places: Places
    uncounted: set[int]
    """Roles that have yet to say how far their start-up's record goes."""
    stop: Stop
    """The request to stop that all others get, once the roles are ready."""
    leaves: str = ""
    """The node that is drained, if so."""
    since: float = 0.0
    idle: dict[str, int] = field(default_factory=dict)
    """Where roles of a drained node start: the idle workers that were there before."""
    counts: dict[int, Counts] = field(default_factory=dict)
    """What the roles that take part have on record of start-up."""
    orders: dict[str, Prepare] = field(default_factory=dict)
    """What the nodes were told on which roles start."""
    ready: dict[int, Counts] = field(default_factory=dict)
    """Roles that wait for their state, with what they have on record."""
    _on: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._on = by_node(self.places)

    @property
    def complete(self) -> bool:
        """Whether all roles are ready."""
        return len(self.ready) == len(self.places)

    def on(self, node: str) -> list[int]:
        """The roles that start on this node."""
        return self._on.get(node, [])


@dataclass
class Returned:
    """Roles that came back with the epoch under way."""

    roles: set[int]
    since: float

    def late(self, restored: Collection[int], limit: float, now: float) -> list[int]:
        """The roles that should have had their state by now.

        FT-HSDP, section 6.1: a limit on waiting decides between stalling the others and joining later.
        """
        return sorted(self.roles - set(restored)) if now - self.since >= limit else []


@dataclass
class Prestart:
    """The attempt under way, and what came of the last ones."""

    attempt: PrestartAttempt | None = None
    failed: int = 0
    """Attempts in a row that have failed."""
    returned: Returned = field(default_factory=lambda: Returned(set(), 0.0))
    pause: float = PAUSE
    not_before: float = -math.inf
    _moves_failed: tuple[str, int] = "", 0
    """The node whose roles failed to start elsewhere last, and how often they did."""
    _emptied: dict[str, int] = field(default_factory=dict)
    """Nodes where newcomers were ended that others may need the workers of: how many were idle before."""

    def tick(self, cluster: ClusterState, now: float) -> list[Effect]:
        """All roles have finished a step in this epoch: if there are workers for all roles of a group that is
        away, begin."""
        if self.attempt is not None or self.failed >= ATTEMPTS or now < self.not_before:
            return []
        here, hosts, capacity = cluster.places, cluster.roles_by_node, cluster.settings.nproc_per_node
        if not cluster.current_plan.absent:
            return []
        # Who has all of its devices in use has no room, and is nearly everybody.
        usable = ((n, node) for n, node in cluster.nodes.items() if n not in cluster.draining)
        idle = {n: node.idle for n, node in usable if len(hosts.get(n, ())) < capacity}
        room = sum(min(count, capacity - len(hosts.get(n, ()))) for n, count in idle.items())
        if room < cluster.groups.size:
            return []
        avoided = cluster.avoided(now) | cluster.faulted(now).keys()
        places = cluster.groups.returning(here, idle, capacity, avoided)
        return self.begin(cluster, places, now) if places else []

    def begin(self, cluster: ClusterState, places: Places, now: float, leaves: str = "") -> list[Effect]:
        """Start roles in these places. `leaves`: the node that they are to leave, if they are not away."""
        idle = {name: cluster.nodes[name].idle for name in set(places.values())} if leaves else {}
        here = set(cluster.places)
        self.attempt = PrestartAttempt(places, here, Stop(bool(leaves), set(here)), leaves, now, idle)
        return sends_to(cluster.nodes_with_roles(), SendCounts())

    def leave(self, cluster: ClusterState, node: str, now: float) -> list[Effect]:
        """Have all stop at the end of the same step, without anybody starting, for a node's replica groups to
        go."""
        self.attempt = PrestartAttempt({}, set(), Stop(True, set(cluster.places)), node, now)
        return self.attempt.stop.ask(cluster, now)

    def leaves(self) -> str:
        """The node whose replica groups go now, since all have stopped for that; empty: none."""
        attempt = self.attempt
        return "" if attempt is None or attempt.places or attempt.stop.unheld else attempt.leaves

    def on_counts(self, cluster: ClusterState, message: OperationCounts) -> list[Effect]:
        """A role that takes part says which operations of the start-up phase it has on record."""
        attempt = self.attempt
        if attempt is None or message.role not in attempt.uncounted:
            return []
        attempt.counts[message.role] = message.counts
        attempt.uncounted.discard(message.role)
        if attempt.uncounted:
            return []
        roles = sorted(attempt.places)
        reason = (
            f"the roles of node {attempt.leaves} start elsewhere"
            if attempt.leaves
            else f"replica groups {cluster.groups.of(roles)} start"
        )
        done = completed(attempt.counts.items())
        attempt.orders = prepare(cluster.current_plan, attempt.places, done)
        sends: list[Effect] = [
            Send(cluster.nodes[name].peer, order)
            for name, order in attempt.orders.items()
            if name in cluster.nodes
        ]
        return [Record("preparing", cluster.epoch, reason, tuple(roles)), *sends]

    def back(self, node: Node, roles: Collection[int]) -> list[Effect]:
        """Say again what a node was asked, since its connection had broken. `roles`: its own."""
        if self.attempt is None:
            return []
        if self.attempt.uncounted & set(roles):
            return [Send(node.peer, SendCounts())]
        if (order := self.attempt.orders.get(node.name)) is not None:
            return [Send(node.peer, order)]
        return []

    def records(self, roles: Places) -> list[tuple[int, Counts]]:
        """What newcomers that are ready have on record, of those with which an epoch with `roles` begins just
        there. They have replayed it: those who did it may be lost since."""
        attempt, there = self.attempt, self.places()
        if attempt is None or not attempt.complete:
            return []
        return [ready for ready in sorted(attempt.ready.items()) if roles.get(ready[0]) == there[ready[0]]]

    def remind(self, node: Node, shown: Collection[int]) -> list[Effect]:
        """A node that knows the plan has no worker for a role that is to start there: it had not begun the
        plan when it was told, perhaps. `shown`: roles that it has workers for."""
        order = None if self.attempt is None else self.attempt.orders.get(node.name)
        return [Send(node.peer, order)] if order is not None and set(order.roles) - set(shown) else []

    def on_prepared(
        self, cluster: ClusterState, node: str, role: int, counts: Counts, running: bool, now: float
    ) -> list[Effect]:
        """A role's worker has started there, and waits for its state."""
        attempt = self.attempt
        if attempt is None or not self.concerns(role, node) or role in attempt.ready:
            return []
        attempt.ready[role] = counts
        return attempt.stop.ask(cluster, now) if attempt.complete and running else []

    def ask_again(self, cluster: ClusterState, now: float) -> list[Effect]:
        """Ask all who train once more, where nobody's step is to be cut off and not all have stopped after
        the same one."""
        attempt = self.attempt
        return [] if attempt is None or not attempt.complete else attempt.stop.ask_again(cluster, now)

    def on_beat(self, cluster: ClusterState, node: str) -> list[Effect]:
        """A node's heartbeat says how far its roles have come."""
        return [] if self.attempt is None else self.attempt.stop.on_beat(cluster, node)

    def on_paused(self, cluster: ClusterState, role: int, now: float) -> list[Effect]:
        """A role that takes part has stopped at the end of its step. So do all, or hardly later."""
        attempt = self.attempt
        return [] if attempt is None or not attempt.complete else attempt.stop.on_paused(cluster, role, now)

    def due(self, cluster: ClusterState, now: float) -> list[int]:
        """The roles with which the next epoch is to begin now, since nobody would be disturbed by it."""
        attempt = self.attempt
        if attempt is None or not attempt.complete:
            return []
        return sorted(attempt.places) if attempt.stop.due(now) else []

    def places(self) -> Places:
        """Where the newcomers are that can take part in the next epoch."""
        return dict(self.attempt.places) if self.attempt is not None and self.attempt.complete else {}

    def concerns(self, role: int, node: str) -> bool:
        """Whether the worker of that role there is being started, and takes no part yet."""
        return self.attempt is not None and self.attempt.places.get(role) == node

    def taking_part(self, node: str, beats: Mapping[int, RoleBeat]) -> Mapping[int, RoleBeat]:
        """What a node says of workers whose roles do not train elsewhere yet."""
        if self.attempt is None or not self.attempt.leaves or not self.attempt.on(node):
            return beats
        return {role: beat for role, beat in beats.items() if not self.concerns(role, node)}

    def on(self, node: str) -> list[int]:
        """The roles that are starting on this node."""
        return self.attempt.on(node) if self.attempt is not None else []

    def fail(self, cluster: ClusterState, reason: str) -> list[Effect]:
        """Give the attempt up, for this reason: nobody else notices."""
        if self.attempt is None:
            return []
        if self.attempt.leaves:
            self._moves_failed = self.attempt.leaves, self.moves_failed(self.attempt.leaves) + 1
            return self._end(cluster, self.attempt, "not_moving", reason)
        self._failed(cluster, self.attempt.places)
        return self._end(cluster, self.attempt, "not_returning", reason)

    def _end(self, cluster: ClusterState, attempt: PrestartAttempt, event: str, reason: str) -> list[Effect]:
        self.attempt, self._emptied = None, attempt.idle
        return [
            Record(event, cluster.epoch, reason, tuple(sorted(attempt.places))),
            *release(cluster),
            *_withdraw(cluster, attempt.places),
        ]

    def moves_failed(self, node: str) -> int:
        """How often the roles of a node have failed to start elsewhere, since its drain was asked for."""
        return self._moves_failed[1] if self._moves_failed[0] == node else 0

    def stays(self) -> None:
        """A node is used as before, and its drain is over."""
        self._moves_failed = "", 0

    def clears(self, cluster: ClusterState) -> bool:
        """Whether there will soon be more idle workers: in the places of newcomers that were ended."""
        nodes = cluster.nodes
        return any(name in nodes and nodes[name].idle < count for name, count in self._emptied.items())

    def give_up(self, cluster: ClusterState, places: Places) -> list[Effect]:
        """Have roles that came back with this epoch leave again: an attempt that has failed."""
        self._failed(cluster, places)
        return _withdraw(cluster, places)

    def _failed(self, cluster: ClusterState, places: Places) -> None:
        self.failed += 1
        if self.failed >= ATTEMPTS:
            log.warning(
                "replica groups %s could not come back %d times in a row; the next node that joins, or "
                "`ftrun --join`, makes them try again",
                *(cluster.groups.of(places), self.failed),
            )

    def epoch_begins(self, roles: Collection[int], now: float) -> None:
        """An epoch of these `roles` begins. Agents end the workers that have started and take no part in
        it."""
        moves = self.attempt is not None and self.attempt.leaves
        came = set[int]() if moves else self.places().keys() & roles
        self.returned, self.attempt, self._emptied = Returned(came, now), None, {}

    def taken_over(self, now: float) -> None:
        """The plan is another controller's."""
        self.returned, self.attempt, self._emptied = Returned(set(), now), None, {}

    def epoch_ends(self, cluster: ClusterState, now: float) -> list[Effect]:
        """If no step has ended since groups came back, it was in vain. The places of those who only begin to
        move may be needed."""
        if self.returned.roles:
            self.returned, self.not_before = Returned(set(), now), now + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        attempt = self.attempt
        if attempt is None or not attempt.leaves or attempt.complete:
            return []
        return self._end(cluster, attempt, "not_moving", "an epoch has ended first")

    def on_stepped(self) -> None:
        """All roles have finished a step in this epoch."""
        if self.returned.roles:
            self.returned, self.failed, self.pause = Returned(set(), 0.0), 0, PAUSE

    def on_node_joined(self) -> None:
        """Worth another attempt."""
        self.failed = 0


def _withdraw(cluster: ClusterState, places: Places) -> list[Effect]:
    """End the workers that play these roles; others take their places."""
    return [
        Send(cluster.nodes[name].peer, Withdraw(roles=roles))
        for name, roles in sorted(by_node(places).items())
        if name in cluster.nodes
    ]

"""Takes nodes out on purpose, without a failure: who is drained, where its roles go, and when it may end.

Its roles start elsewhere while they still train here (`control.prestart.attempts`), and all change over
between two steps. Where there is no room, and the node is about to go, its replica groups leave so, if the
policy is `shrink`. Then it is a node without roles, which may keep copies for others: those go elsewhere from
the next step on, and once all that is needed is there, it ends. Nothing is kept in fewer places meanwhile.

The node itself keeps that it is drained, and tells a controller's successor.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ft_core.control.cluster.node import Node, sends_to
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.groups import Places
from ft_core.control.decide.role_placement import PlacementCapacity
from ft_core.control.events import Close, Effect, Peer, Record, Send
from ft_core.control.observe import explain
from ft_core.control.prestart.attempts import ATTEMPTS, STANDBY_GRACE, Prestart
from ft_core.protocol.domains import place
from ft_core.protocol.messages import (
    Denied,
    Drain,
    Drains,
    Heartbeat,
    NodeName,
    SendHeartbeat,
    Shutdown,
)

LOOK = 0.5
"""Seconds between two looks at how far all roles are."""


CHECK = 20.0
"""Seconds before it is gone in which a node does not wait for the check of another one."""


@dataclass
class LettingGo:
    """A node without roles that is to keep no copies any more: all others were told so."""

    name: NodeName
    unheard: set[NodeName]
    """Nodes with roles that have yet to say that they know, and how far they are by then."""
    newest: int = -1
    """The newest version whose copies may have gone to it."""
    look_at: float = -math.inf


class Draining:
    """The drains of one controller. What it was asked for is in `ClusterState.draining`."""

    def __init__(self) -> None:
        self._going: LettingGo | None = None
        self._number = 0
        self.held: set[NodeName] = set()
        """Nodes that were told to stay for now, with their workers: others go back to what they hold."""
        self._deadlines: dict[NodeName, float] = {}
        """When nodes are gone that are drained since they are about to go."""
        self._room_by = math.inf
        """The time until which standbys are waited for, in the places of newcomers that have died."""

    # -- who is drained ----------------------------------------------------------------------------

    def ask(
        self, cluster: ClusterState, prestart: Prestart, peer: Peer, asked: NodeName, why_not: str
    ) -> list[Effect]:
        """Somebody wants this node out. `why_not`: why nothing can begin at present; empty, as a rule."""
        names = [name for name in cluster.nodes if asked in (name, place(name))]
        if len(names) != 1:
            return [Send(peer, Denied(error=f"no such node: {asked}"))]
        [name] = names
        roles, effects = cluster.roles_by_node.get(name, []), list[Effect]()
        if name not in cluster.draining:
            if reason := why_not or self.objection(cluster, name):
                return [Send(peer, Denied(error=f"node {name} cannot be drained: {reason}"))]
            effects = self.begin(cluster, prestart, name, "ftctl drain")
        before = cluster.draining[: cluster.draining.index(name)]
        return [*effects, Send(peer, Drains(name, len(roles), before))]

    def begin(
        self,
        cluster: ClusterState,
        prestart: Prestart,
        name: NodeName,
        why: str,
        deadline: float = math.inf,
    ) -> list[Effect]:
        """Take a node out to which there is no `objection`. `deadline`: when it is gone; those whose time is
        up first go first."""
        self._deadlines = {n: at for n, at in self._deadlines.items() if n in cluster.draining}
        cluster.draining.append(name)
        self.goes_by(cluster, name, deadline)
        roles = tuple(cluster.roles_by_node.get(name, ()))
        effects: list[Effect] = [
            Send(cluster.nodes[name].peer, Drain(wanted=True)),
            Record("draining", cluster.epoch, why, roles, {"node": name}),
        ]
        if prestart.on(name):
            effects += prestart.fail(cluster, f"node {name} is to be drained")
        return effects

    def goes_by(self, cluster: ClusterState, name: NodeName, deadline: float) -> None:
        """A node that is drained is gone by then, as far as is known now."""
        if self._deadlines.get(name) != deadline:
            self._deadlines[name] = deadline
            cluster.draining.sort(key=lambda each: self._deadlines.get(each, math.inf))

    def forget(self, cluster: ClusterState, prestart: Prestart, name: NodeName) -> list[Effect]:
        """A node is not taken out any more: the job ends, as somebody wants it."""
        if name not in cluster.draining:
            return []
        cluster.draining.remove(name)
        attempt = prestart.attempt
        if attempt is not None and attempt.leaves == name:
            return prestart.fail(cluster, "the job was told to end (SIGTERM)")
        return []

    def objection(self, cluster: ClusterState, name: NodeName, unfit: Collection[NodeName] = ()) -> str:
        """Why a node cannot be taken out, if so. Those that are drained already go first. `unfit`: nodes that
        none of their roles is to go to."""
        going = [*cluster.draining, name]
        roles = [role for each in going for role in cluster.roles_by_node.get(each, ())]
        if _room(cluster, [*going, *unfit]).left < len(roles):
            return _no_room(cluster, len(roles), [*going, *unfit])
        if not _enough_without(cluster, going):
            left = len({node.hello.domain for other, node in cluster.nodes.items() if other not in going})
            k = cluster.settings.replicas
            return (
                f"{left} failure domains would be left, and the state is kept in {k + 1} (--ft-replicas "
                f"{k}); have another node join first: {explain.how_to_join(cluster)}"
            )
        return ""

    def on_greeting(self, cluster: ClusterState, node: Node, known: bool) -> list[Effect]:
        """A node has come, and says whether it is drained; if it was `known`, it may have missed that."""
        wanted = node.name in cluster.draining or (known and node.name in self.held)
        if node.hello.draining and not wanted and not known:
            cluster.draining.append(node.name)
            return [Record("draining", cluster.epoch, "it was asked for before", more={"node": node.name})]
        effects: list[Effect] = []
        if node.hello.draining is not wanted:
            effects.append(Send(node.peer, Drain(wanted)))
        if self._going is not None and node.name in self._going.unheard:
            effects.append(Send(node.peer, SendHeartbeat(self._number)))
        return effects

    def on_node_lost(self, cluster: ClusterState, node: NodeName) -> list[Effect]:
        """A node is about to be forgotten as lost."""
        if node not in cluster.draining:
            return []
        return [Record("not_drained", cluster.epoch, "the node was lost before", more={"node": node})]

    # -- its roles move ----------------------------------------------------------------------------

    def tick(self, cluster: ClusterState, prestart: Prestart, now: float) -> list[Effect]:
        """All roles have finished a step in this epoch, and none of them has come to the end of training."""
        attempt = prestart.attempt
        if attempt is not None:
            limit = cluster.settings.hang_limit
            if attempt.complete or now - attempt.since < limit:
                return prestart.ask_again(cluster, now)
            late = sorted(attempt.places.keys() - attempt.ready.keys())
            reason = f"roles {late} were not ready elsewhere within --ft-hang-limit, {limit:g} s"
            failed = prestart.fail(cluster, reason)
            if not attempt.leaves:
                return failed
            return [*failed, *self._give_up(cluster, prestart, attempt.leaves, reason)]
        name = next((name for name in cluster.draining if name in cluster.roles_by_node), None)
        if name is None:
            return self._let_go(cluster, now) if cluster.draining else []
        if prestart.moves_failed(name) >= ATTEMPTS:
            return self._give_up(cluster, prestart, name, f"{ATTEMPTS} starts of its roles elsewhere failed")
        places = _elsewhere(cluster, cluster.roles_by_node[name], now)
        if places is None:
            time_left = self._deadlines.get(name, math.inf) - now
            self._room_by = min(self._room_by, now + STANDBY_GRACE)
            soon = prestart.clears(cluster) and now < self._room_by
            if soon or (cluster.checking() and time_left > CHECK):
                return []
            self._room_by = math.inf
            if self._deadlines.get(name, math.inf) < math.inf and can_shrink(cluster, name):
                return prestart.leave(cluster, name, now)
            return self._give_up(cluster, prestart, name, _no_room(cluster, len(cluster.roles_by_node[name])))
        self._room_by = math.inf
        return prestart.begin(cluster, places, now, leaves=name)

    def _give_up(self, cluster: ClusterState, prestart: Prestart, name: NodeName, why: str) -> list[Effect]:
        """Use a node as before."""
        prestart.stays()
        cluster.draining.remove(name)
        return [
            Record(
                "not_drained", cluster.epoch, why, tuple(cluster.roles_by_node.get(name, ())), {"node": name}
            ),
            Send(cluster.nodes[name].peer, Drain(wanted=False)),
        ]

    # -- it ends -----------------------------------------------------------------------------------

    def epoch_begins(self, cluster: ClusterState) -> None:
        """Each may have what others go on from."""
        self._going, self._room_by, cluster.departing = None, math.inf, ""

    def _let_go(self, cluster: ClusterState, now: float) -> list[Effect]:
        """Let the first end that has no role. Who calls this tells all of `ClusterState.departing` before it
        sends what is returned."""
        going = self._going
        if going is None or going.name not in cluster.nodes:
            name = next((name for name in cluster.draining if _enough_without(cluster, [name])), None)
            if name is None:
                return []  # it stays, and keeps copies, until another node comes
            self._number, cluster.departing = self._number + 1, name
            self._going = LettingGo(name, {node.name for node in cluster.nodes_with_roles()})
            return sends_to(cluster.nodes_with_roles(), SendHeartbeat(self._number))
        if going.unheard or now < going.look_at:
            return []
        going.look_at = now + LOOK
        # Copies of a newer version were never sent there.
        for node in cluster.nodes_with_roles():
            for role in cluster.roles_by_node[node.name]:
                if (beat := node.beats.get(role)) is None or beat.committed <= going.newest:
                    return []
        node = cluster.nodes[going.name]
        cluster.drop(node)
        self.epoch_begins(cluster)
        reason = "it plays no role, and all that it kept is elsewhere"
        return [
            Record("drained", cluster.epoch, reason, more={"node": node.name}),
            Send(node.peer, Shutdown(code=0, drained=True)),
            Close(node.peer),
        ]

    def on_beat(self, node: Node, beat: Heartbeat) -> None:
        """Perhaps it knows by now who keeps no copies any more."""
        going = self._going
        if going is not None and beat.answers == self._number:
            going.unheard.discard(node.name)
            going.newest = max([going.newest, *(each.step for each in beat.roles.values())])


def can_shrink(cluster: ClusterState, name: NodeName) -> bool:
    """Whether the others can go on without the replica groups that have roles on a node."""
    roles = cluster.roles_by_node.get(name, ())
    return bool(
        cluster.settings.policy == "shrink" and roles and cluster.groups.without(cluster.places, roles)[0]
    )


def _no_room(cluster: ClusterState, roles: int, going: list[NodeName] | None = None) -> str:
    left = _room(cluster, cluster.draining if going is None else going).left
    return (
        f"{roles} roles would have to move, and other nodes have workers for {left}; have another node join "
        f"first: {explain.how_to_join(cluster)}"
    )


def _room(cluster: ClusterState, going: list[NodeName], avoided: Collection[str] = ()) -> PlacementCapacity:
    out = set(going)
    idle = {name: node.idle for name, node in cluster.nodes.items() if name not in out}
    return PlacementCapacity(cluster.places, idle, cluster.settings.nproc_per_node, avoided)


def _elsewhere(cluster: ClusterState, roles: list[int], now: float) -> Places | None:
    """Places for these on nodes that stay, if there is room."""
    room = _room(cluster, cluster.draining, cluster.avoided(now) | cluster.faulted(now).keys())
    return room.take(roles) if len(roles) <= room.left else None


def _enough_without(cluster: ClusterState, going: list[NodeName]) -> bool:
    """Whether as many failure domains are left as copies are kept in, or as there are now."""
    there = {node.hello.domain for node in cluster.nodes.values()}
    left = {node.hello.domain for name, node in cluster.nodes.items() if name not in going}
    return len(left) >= min(cluster.settings.replicas + 1, len(there))

"""Brings replica groups back while the others train (FT-HSDP, sections 4.3 and 5): the controller's part.

What takes long for a newcomer is to start: the script, the model, the record of start-up to replay. It does
all that ahead of the epoch in which it takes part, without anybody waiting for it. That epoch begins once
every role of the group is ready for its state, between two steps of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from ft_core.control.groups import Places
from ft_core.control.nodes import Message, Node, completed

if TYPE_CHECKING:
    from ft_core.control.controller import Controller

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Of a group's start in a row that may fail before the job goes on without it until a node joins."""


_NOTICE = 2
"""Steps between the newest that anybody has done and the one after which all stop: enough for all to hear."""
_STEPS = 5
"""Steps after which those who train are interrupted: they do something else (evaluation, a checkpoint)."""
_SKEW = 0.25
"""Seconds between the first and the last role's end of a step; who takes longer has missed the request."""


class Rejoin:
    """One attempt at a time."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        self._places: Places = {}
        self._uncounted: set[int] = set()
        """Roles that have yet to say how far their start-up's record goes."""
        self._ready: set[int] = set()
        self._unheard: set[str] = set()
        """Nodes that have yet to say how far those who train have come."""
        self._held: set[int] = set()
        """Roles that take part, and have stopped at the end of a step for those who come back."""
        self._no_later_than = 0.0
        self._failed = 0
        self._returned: set[int] = set()
        """Roles that came back with the epoch under way."""
        self._returned_at = 0.0
        self._prepare: dict[str, Message] = {}
        """What the nodes were told that bring roles back."""

    def tick(self) -> None:
        """An epoch is under way: if there are workers for all roles of a group that is away, begin."""
        if self.complete and self._c.clock.now > self._no_later_than:
            self._return()
        if self._places or self._failed >= _ATTEMPTS or self._c.released:
            return
        here = {int(role): node for role, node in self._c.plan["roles"].items()}
        idle = {node.name: int(node.heartbeat["idle"]) for node in self._c.nodes.values()}
        found = self._c.groups.returning(here, idle, self._c.settings.nproc_per_node)
        self._places = {role: node for role, node in found.items() if role not in here}
        if self._places:
            self._uncounted = set(here)
            for node in self._others():
                node.post({"type": "counts"})

    def counted(self, node: Node, message: Message) -> None:
        """A role that takes part says which operations of the start-up phase it has on record."""
        role = int(message["role"])
        if role not in self._uncounted:
            return
        known = node.holdings["roles"].setdefault(
            str(role), {"alive": True}
        )  # in the first epoch there is none
        known["counts"] = message["counts"]
        self._uncounted.discard(role)
        if self._uncounted:
            return
        roles = sorted(self._places)
        self._c.event("preparing", f"replica groups {self._c.groups.of(roles)} start", roles)
        plan = {
            "origin": "memory",
            "ahead": {role: self._c.plan["absent"].get(str(role)) for role in roles},
            "completed": completed(self._c.nodes.values(), set(map(int, self._c.plan["roles"]))),
            "absent": {r: other for r, other in self._c.plan["absent"].items() if int(r) not in self._places},
        }
        epoch = self._c.plan["epoch"]
        for name in set(self._places.values()):
            mine = sorted(self.roles_on(name))
            self._prepare[name] = {"type": "prepare", "epoch": epoch, "roles": mine, "changes": plan}
            if (there := self._c.nodes.get(name)) is not None:
                there.post(self._prepare[name])

    def roles_on(self, name: str) -> set[int]:
        """Those that are to come back on this node."""
        return {role for role, where in self._places.items() if where == name}

    def back(self, node: Node) -> None:
        """A node's connection had broken: what it was asked may have been lost with it."""
        if self._uncounted & {int(role) for role in node.holdings["roles"]}:
            node.post({"type": "counts"})
        elif node.name in self._prepare:
            node.post(self._prepare[node.name])

    def succeeded(self) -> None:
        """All roles have finished a step in this epoch."""
        if self._returned:
            self._failed = 0

    def prepared(self, role: int) -> None:
        """A role's worker has started, and waits for its state."""
        if role in set(self._places) - self._ready:
            self._ready.add(role)
            if self.complete and self._c.running:
                # A step that is cut off is done again: the others are asked to stop where one of theirs ends,
                # and all after the same one, which has to lie ahead of everybody.
                self._no_later_than = self._c.clock.now + _STEPS * max(self._each("step_s"), default=0) + 1
                self._unheard = {node.name for node in self._others()}
                for node in self._others():
                    node.post({"type": "beat"})

    def beat(self, node: Node) -> None:
        """A node's heartbeat says how far its roles have come."""
        if node.name in self._unheard:
            self._unheard.discard(node.name)
            if not self._unheard:
                self._have_others_hold(self._c.epoch, int(max(self._each("step"), default=0)) + _NOTICE)

    def held(self, role: int) -> None:
        """A role that takes part has stopped at the end of its step. So do all, or hardly later."""
        if not self.complete:
            return
        if not self._held:
            self._c.event("held", "the others stop at the end of a step", [role])
            self._no_later_than = self._c.clock.now + _SKEW
        self._held.add(role)
        if self._held == {int(role) for role in self._c.plan["roles"]}:
            self._return()

    def _return(self) -> None:
        roles = sorted(self._places)
        self._c.end_epoch("returning", f"replica groups {self._c.groups.of(roles)} come back", roles)

    def _have_others_hold(self, epoch: int, step: int = 0) -> None:
        for node in self._others():
            node.post({"type": "hold", "epoch": epoch, "step": step})

    def _each(self, name: str) -> list[float]:
        """What the heartbeats say of those who train."""
        return [row[name] for node in self._others() for row in node.heartbeat["roles"].values()]

    def _others(self) -> list[Node]:
        names = set(self._c.plan["roles"].values())
        return [node for name, node in self._c.nodes.items() if name in names]

    @property
    def complete(self) -> bool:
        """Whether all roles of the group are ready."""
        return bool(self._places) and self._ready == set(self._places)

    @property
    def places(self) -> Places:
        """Where the roles are that can take part in the next epoch."""
        return dict(self._places) if self.complete else {}

    def concerns(self, role: int) -> bool:
        """Whether the role is one of a group that is being started, and takes no part yet."""
        return role in self._places

    def failed(self, reason: str) -> None:
        """A worker or node of the group is lost while it starts: nobody else notices."""
        self._c.event("not_returning", reason, sorted(self._places))
        self._have_others_hold(0)
        self.give_up(self._places)
        self._clear()

    def give_up(self, places: Places) -> None:
        """End the workers that play these roles; others take their places."""
        self._failed += 1
        if self._failed >= _ATTEMPTS:
            log.warning(
                "replica groups %s could not come back %d times in a row; the next node that joins, or "
                "`ftrun --join`, makes them try again",
                *(self._c.groups.of(places), self._failed),
            )
        for name in set(places.values()):
            mine = [role for role, where in places.items() if where == name]
            if (node := self._c.nodes.get(name)) is not None:
                node.post({"type": "withdraw", "roles": mine})

    def late(self, restored: Collection[int]) -> list[int]:
        """Roles that have come back with this epoch, and should have had their state by now.

        FT-HSDP, section 6.1: a limit on waiting decides between stalling the others and joining later.
        """
        if self._c.clock.now - self._returned_at < self._c.settings.return_limit:
            return []
        return sorted(self._returned - set(restored))

    def node_lost(self, name: str) -> None:
        """A node that takes no part is gone."""
        if name in self._places.values():
            self.failed(f"node {name} is lost")

    def epoch_begins(self) -> None:
        """With those who were ready; agents end the workers of those who were not."""
        self._returned, self._returned_at = set(self.places), self._c.clock.now
        self._clear()

    def news(self) -> None:
        """Nodes have come or gone: worth another attempt."""
        self._failed = 0

    def _clear(self) -> None:
        self._places, self._prepare = {}, {}
        for known in (self._uncounted, self._ready, self._unheard, self._held):
            known.clear()

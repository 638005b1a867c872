"""What an agent says about its node: who it is, that it lives, and what it could give to a recovery."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ft_core.state.memory import Word

if TYPE_CHECKING:
    from ft_core.node.agent import Agent

log = logging.getLogger(__name__)
Message = dict[str, Any]


class Said:
    """What the controller must know of this node's roles, as it was said.

    It may not have been heard: the connection breaks, a controller is restarted. So all of it is repeated
    with each greeting, which does no harm. Of each kind the newest counts; a role's next worker begins anew.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[str, int, bool], Message] = {}

    def keep(self, message: Message) -> None:
        """It is about `message["role"]`."""
        self._messages[message["type"], message["role"], message.get("adopted", False)] = message

    def forget(self, roles: Collection[int]) -> None:
        """They have other workers from now on, or are elsewhere."""
        self._messages = {key: kept for key, kept in self._messages.items() if key[1] not in roles}

    def keep_only(self, roles: Collection[int]) -> None:
        """All others are elsewhere."""
        self.forget({role for _, role, _ in self._messages} - set(roles))

    def get(self, kind: str, role: int) -> Message | None:
        """What was said of that kind."""
        return self._messages.get((kind, role, False))

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages.values())


class Reports:
    """Reads the agent; changes nothing in it."""

    def __init__(self, agent: Agent) -> None:
        self._a = agent

    def identity(self) -> Message:
        """Who this is; said once per connection."""
        return {
            "node": self._a.node,
            "pid": os.getpid(),
            "node_rank": self._a.node_rank,
            "domain": self._a.domain,
            "data": self._a.transport.address,
        }

    def holdings(self) -> Message:
        """What this node could contribute to a recovery."""
        store = self._a.store
        roles: dict[str, Message] = {}
        segments: dict[str, list[int]] = {}
        for role in self._a.roles_here():
            worker, memory = self._a.pool.of_role(role), store.memory(role)
            layout = memory.segments()
            segments.update({s.id: list(s.holders) for s in layout})
            roles[str(role)] = {
                "alive": worker is not None,
                "stage": worker.stage if worker else "startup",
                "versions": memory.versions(),
                "segments": [s.id for s in layout],
                "counts": worker.counts if worker else {},
            }
        replicas = store.replicas.versions()
        for name in replicas:
            if (segment := store.replicas.segment(name)) is not None:
                segments[name] = list(segment.holders)
        elsewhere = [store.memory(role) for role in set(store.roles) - set(self._a.roles_here())]
        for memory in [*elsewhere, *store.adopted.values()]:
            for segment in memory.segments():
                held = {*replicas.get(segment.id, []), *memory.versions()}
                replicas[segment.id] = sorted(held)
                segments[segment.id] = list(segment.holders)
        return {
            **self.progress(),
            "reported": self._a.reported,
            "roles": roles,
            "replicas": replicas,
            "segments": segments,
            "idle": len(self._a.pool.idle()),
            "store": self._a.stores.address,
            "master": self._a.master,
            "configured": self._a.configured,
        }

    def progress(self) -> Message:
        """What this node has heard from the controller."""
        return {"epoch": self._a.epoch, "begun": self._a.plan.get("id", "")}

    def state_of(self, role: int) -> Message:
        """A role's segments and what protecting them has taken so far, for `ftctl plan`."""
        worker = self._a.pool.of_role(role)
        return {
            "role": role,
            "segments": [s.to_json() for s in self._a.store.memory(role).segments()],
            "ring": worker.ring if worker else [],
            "step_seconds": worker.control[Word.STEP_NS] / 1e9 if worker else 0,
            "bytes_per_second": self._a.replicator.bandwidth(),
        }

    def heartbeat(self) -> Message:
        """That this node lives, and where its workers are."""
        roles = {}
        for worker in self._a.pool.playing():
            role = worker.role
            assert role is not None
            sent, snapshots = self._a.replicator.sent(role)
            roles[str(role)] = {
                "pid": worker.pid,
                "step": worker.control[Word.VERSION],
                "tag": worker.control[Word.TAG],
                "held": self._a.store.memory(role).versions(),
                "committed": worker.control[Word.COMMITTED],
                "step_s": worker.control[Word.STEP_NS] / 1e9,
                "waited_s": worker.control[Word.WAITED_NS] / 1e9,
                "h2h_bytes": sent,
                "h2h_snapshots": snapshots,
            }
        idle, replicas = len(self._a.pool.idle()), self._a.store.replicas.versions()
        about = {"roles": roles, "idle": idle, "replicas": replicas}
        return {"type": "heartbeat", **self.progress(), **about}

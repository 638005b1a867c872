"""What the controller knows of each live agent, and what it reads from their reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_core.control import decision
from ft_core.protocol import messages as protocol
from ft_core.protocol.async_channel import AsyncChannel

Message = dict[str, Any]


@dataclass
class Node:
    """A live agent. No other process has had its name: it stands for all that the process holds."""

    name: str
    channel: AsyncChannel[Any]
    about: Message
    seen: float
    """When it was heard last, on the controller's clock."""
    encoded: Callable[[Message], protocol.Message]
    holdings: Message = field(default_factory=dict)
    heartbeat: Message = field(default_factory=dict)
    gone_since: float | None = None
    planned: float = float("-inf")
    """When a plan was sent over this connection last."""

    @property
    def epoch_begun(self) -> int:
        """The epoch of the plan that it had when it greeted."""
        return int(self.about["begun"].partition("-")[0] or 0)

    def post(self, message: Message) -> None:
        """Send without waiting. A broken connection is noticed by its reader."""
        with contextlib.suppress(ConnectionError):
            self.channel.post(self.encoded(message))


def versions(held: Message) -> list[int]:
    """All that a node says it holds, of whatever."""
    found = [*held["replicas"].values(), *(about["versions"] for about in held["roles"].values())]
    return [int(version) for each in found for version in each]


def alive(nodes: Mapping[str, Node], role: int, node: str) -> bool:
    """Whether `role` has a live worker on `node`."""
    about = nodes[node].holdings["roles"].get(str(role)) if node in nodes else None
    return about is not None and bool(about["alive"])


def report(node: Node, catalogue: dict[str, list[int]]) -> decision.NodeReport:
    """What a node holds, as the decision reads it. `catalogue`: holders of the segments known so far."""
    held = node.holdings
    roles = {}
    for role, about in held["roles"].items():
        roles[int(role)] = decision.RoleReport(
            role=int(role),
            node=node.name,
            alive=about["alive"],
            stage=about["stage"],
            versions=tuple(about["versions"]),
            segments=tuple(about["segments"]),
        )
    return decision.NodeReport(
        node=node.name,
        domain=node.about["domain"],
        roles=roles,
        replicas={segment: tuple(versions) for segment, versions in held["replicas"].items()},
        segments=catalogue | held["segments"],
    )


def copies(
    nodes: Iterable[Node], catalogue: Mapping[str, Iterable[str]], roles: Collection[int]
) -> dict[int, list[str]]:
    """For each of `roles` the nodes that keep copies for others, once for each of the role's segments."""
    held = {node.name: set(node.holdings["replicas"]) for node in nodes}
    return {
        role: [
            name
            for name, found in held.items()
            for segment in catalogue.get(str(role), ())
            if segment in found
        ]
        for role in roles
    }


def where(nodes: Iterable[Node]) -> dict[str, Message]:
    """For the plan: where their memory is asked for, and what they may be lost with."""
    return {n.name: {"data": n.about["data"], "domain": n.about["domain"]} for n in nodes}


def completed(nodes: Iterable[Node], roles: Collection[int]) -> dict[str, list[int]]:
    """For each group how many start-up collectives are done, and a role that has their record.

    `roles`: those that take part. One whose replica group leaves is about to lose its worker.
    """
    found: dict[str, list[int]] = {}
    for node in nodes:
        for role, about in node.holdings["roles"].items():
            there = about["alive"] and int(role) in roles
            for group, count in about["counts"].items() if there else ():
                if count > found.get(group, [0])[0]:
                    found[group] = [count, int(role)]
    return found

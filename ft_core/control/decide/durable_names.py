"""Which durable checkpoints nodes can read: asked when a decision needs to know, and not with every report.

To find out is to read directories on storage that all nodes share, and that may be slow, or away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ft_core.control.cluster.node import Node
from ft_core.control.events import Effect, Peer, Send
from ft_core.protocol.checkpoint_names import Past, parse
from ft_core.protocol.messages import DurableNames, ListDurable

AGAIN = 3.0
"""Seconds after which nodes that do not see the same, or cannot look, are asked again: one may have been
written meanwhile, and what a client remembers of a directory may be old."""
PATIENCE = 30.0
"""Seconds after which a node that still does not see a checkpoint that others see, or cannot look, is taken
not to."""


@dataclass
class Checkpoints:
    """The questions of this moment, and the answers until they may be out of date."""

    number: int = 0
    asked: dict[str, Peer] = field(default_factory=dict)
    """The nodes that were asked, each with the connection that it was asked over."""
    names: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """What the nodes said that could not read the directory."""
    first: dict[str, float] = field(default_factory=dict)
    """When each was asked first."""
    last: dict[str, float] = field(default_factory=dict)
    """When each was asked last."""
    unanswered: set[str] = field(default_factory=set)
    past: Past = field(default_factory=Past)
    """What the job has behind it: other checkpoints do not count."""
    others: set[int] = field(default_factory=set)
    """The numbers of roles of those that are of another number than the job."""
    told: set[str] = field(default_factory=set)
    """The nodes of which it was said that they do not see what others see."""

    def forgotten(self) -> Checkpoints:
        """The questions to ask anew, since a failure or other settings may have changed the answers. Who has
        had its time has had it."""
        first = {node: self.first[node] for node in self._blind()}
        return Checkpoints(self.number + 1, first=first, told=self.told)

    def look(self, nodes: Collection[str], past: Past) -> None:
        """Only these nodes are left, and that is what the job has behind it."""
        self.past = past
        self.names = {name: names for name, names in self.names.items() if name in nodes}
        self.errors = {name: error for name, error in self.errors.items() if name in nodes}

    def common(self, nodes: Collection[str]) -> Mapping[int, str] | None:
        """Versions of which all of these nodes can read a checkpoint, oldest first, with its name.

        Of several of one version it is that of the latest epoch. None if some have not said.
        """
        if not set(nodes) <= set(self.names):
            return None
        found = set.intersection(*(set(self.names[name]) for name in nodes)) if nodes else set()
        return {parse(each).version: each for each in self.past.own(found)}

    def seen(self, nodes: Collection[str], now: float) -> Mapping[int, str] | None:
        """What is `common` to those of these nodes that see what others see, or to the others if none does:
        who is `lacking` says nothing of what there is. None, too, as long as they may yet agree. Nothing
        where somebody cannot look."""
        if not set(nodes) <= set(self.names) or self._may_agree(nodes, now):
            return None
        if not self.errors.keys().isdisjoint(nodes):
            return {}
        return self.common((set(nodes) - self.lacking(now)) or (self.names.keys() - self._behind()))

    @property
    def newest(self) -> str:
        """The newest checkpoint that any node sees; empty if there is none."""
        found = self.past.own({each for names in self.names.values() for each in names})
        return found[-1] if found else ""

    def without(self, name: str, nodes: Collection[str]) -> list[str]:
        """Which of the nodes have looked, and do not see this checkpoint."""
        return sorted(n for n, names in self.names.items() if n in nodes and name and name not in names)

    def lacking(self, now: float) -> set[str]:
        """Nodes that see nothing of what others see, and have had their time: where they look something is
        not mounted, as a rule. Who sees older ones looks at the same storage: all go on from what all see."""
        return {node for node in self._blind() if now - self.first[node] >= PATIENCE}

    def _blind(self) -> set[str]:
        own = {
            node: set(self.past.own(set(self.names[node]))) for node in self.names.keys() - self.errors.keys()
        }
        behind = self._behind()
        seen: set[str] = set().union(*(names for node, names in own.items() if node not in behind))
        return {node for node in behind if own[node].isdisjoint(seen)}

    def _behind(self) -> set[str]:
        if not (newest := self.newest):
            return set()
        version, there = parse(newest).version, self.names.keys() - self.errors.keys()
        return {node for node in there if self._newest_of(node) < version}

    def _newest_of(self, node: str) -> int:
        return max((parse(each).version for each in self.past.own(self.names[node])), default=-1)

    def _may_agree(self, nodes: Collection[str], now: float) -> bool:
        doubtful = (self._behind() | self.errors.keys()).intersection(nodes)
        return any(now - self.first[node] < PATIENCE for node in doubtful)

    def silent(self, nodes: Collection[str], now: float) -> list[str]:
        """Which of these nodes have been asked for long, and do not answer: storage hangs there."""
        asked = self.unanswered.intersection(nodes)
        return sorted(node for node in asked if now - self.last[node] >= PATIENCE)

    def ask(self, nodes: Mapping[str, Node], who: Collection[str], now: float) -> list[Effect]:
        """Ask those of `who` that were not, over the connection that they have now; and all of them again as
        long as they may yet agree."""
        effects: list[Effect] = []
        again = self._may_agree(who, now)
        for name in sorted(who):
            if (node := nodes.get(name)) is None:
                continue
            if self.asked.get(name) != node.peer:
                self.names.pop(name, None)
                self.first.setdefault(name, now)
            elif name in self.unanswered or not again or now - self.last[name] < AGAIN:
                continue
            self.asked[name], self.last[name] = node.peer, now
            self.unanswered.add(name)
            effects.append(Send(node.peer, ListDurable(id=self.number)))
        return effects

    def on_names(self, node: Node, answer: DurableNames) -> bool:
        """A node has looked. Returns whether that was asked for."""
        if answer.id != self.number or self.asked.get(node.name) != node.peer:
            return False
        self.unanswered.discard(node.name)
        self.names[node.name] = answer.names
        self.others.update(answer.others)
        self.errors.pop(node.name, None)
        if answer.error:
            self.errors[node.name] = f"{node.name}: {answer.error}"
        return True

"""Which durable checkpoints nodes can read: asked when a decision needs to know, and not with every report.

To find out is to read directories on storage that all nodes share, and that may be slow, or away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ft_core.control.cluster.node import Node
from ft_core.control.events import Effect, Peer, Send
from ft_core.protocol.checkpoint_names import parse
from ft_core.protocol.messages import DurableNames, ListDurable


@dataclass
class Checkpoints:
    """The questions of this moment, and the answers until they may be out of date."""

    number: int = 0
    asked: dict[str, Peer] = field(default_factory=dict)
    """The nodes that were asked, each with the connection that it was asked over."""
    names: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """What the nodes said that could not read the directory."""

    def forgotten(self) -> Checkpoints:
        """The questions to ask anew, since a failure or other settings may have changed the answers."""
        return Checkpoints(self.number + 1)

    def common(self, nodes: Collection[str]) -> Mapping[int, str] | None:
        """Versions of which all of these nodes can read a checkpoint, oldest first, with its name.

        Of several of one version it is that of the latest epoch. None if some have not said.
        """
        if not set(nodes) <= set(self.names):
            return None
        found = set.intersection(*(set(self.names[name]) for name in nodes)) if nodes else set()
        return {parse(each).version: each for each in sorted(found, key=parse)}

    def ask(self, nodes: Mapping[str, Node], who: Collection[str]) -> list[Effect]:
        """Ask those of `who` that were not, over the connection that they have now."""
        effects: list[Effect] = []
        for name in sorted(who):
            node = nodes.get(name)
            if node is not None and self.asked.get(name) != node.peer:
                self.asked[name] = node.peer
                self.names.pop(name, None)
                effects.append(Send(node.peer, ListDurable(id=self.number)))
        return effects

    def on_names(self, node: Node, answer: DurableNames) -> bool:
        """A node has looked. Returns whether that was asked for."""
        if answer.id != self.number or self.asked.get(node.name) != node.peer:
            return False
        self.names[node.name] = answer.names
        self.errors.pop(node.name, None)
        if answer.error:
            self.errors[node.name] = f"{node.name}: {answer.error}"
        return True

"""Which durable checkpoints nodes can read: asked when a decision needs to know, and not with every report.

To find out is to read directories on storage that all nodes share, and that may be slow, or away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ft_core.control.nodes import Message, Node

if TYPE_CHECKING:
    from ft_core.control.controller import Controller


class Checkpoints:
    """The controller's questions, and the answers until they may be out of date."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        self._number = 0
        self._asked: dict[str, Node] = {}
        self._known: dict[str, list[str]] = {}
        self.errors: dict[str, str] = {}
        """Of the nodes that could not read the directory."""

    def forget(self) -> None:
        """A failure, or other settings: ask again."""
        self._number += 1
        for known in (self._asked, self._known, self.errors):
            known.clear()

    def common(self, names: Collection[str]) -> Mapping[int, str] | None:
        """Versions of which all of these nodes can read a checkpoint, oldest first, with its name.

        Of several of one version it is that of the latest epoch. None where that is not known yet: the nodes
        are asked, and `Controller.reconsider` is called when one has answered.
        """
        if not self._c.settings.durable_dir:
            return {}
        for name in names:
            node = self._c.nodes.get(name)
            if (
                node is not None and self._asked.get(name) is not node
            ):  # a connection of its own for each Node
                self._asked[name] = node
                self._known.pop(name, None)
                node.post({"type": "durable", "id": self._number})
        if not set(names) <= set(self._known):
            return None
        found = set.intersection(*(set(self._known[name]) for name in names)) if names else set()
        return {int(each.split("-")[1]): each for each in sorted(found)}

    def answered(self, node: Node, message: Message) -> None:
        """A node has looked."""
        if message["id"] != self._number or self._asked.get(node.name) is not node:
            return
        self._known[node.name] = message["names"]
        if message["error"]:
            self.errors[node.name] = f"{node.name}: {message['error']}"
        self._c.reconsider()

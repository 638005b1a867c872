"""Settings that the script brings at run time, when `ftrun` could not see them: one set for the whole job.

Every worker asks its agent for them, the agent the controller. The controller takes the first ones that can
be had and tells all agents, newcomers included; agents repeat them to a restarted controller. A worker gets
its answer once the agents of all roles use them: nothing is replicated by other settings.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ft_core.control.nodes import Message, Node
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from ft_core.control.controller import Controller

log = logging.getLogger(__name__)

_SOURCE = "the script's configuration"


class Configuration:
    """The controller's part."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        self._values: dict[str, Any] | None = None
        self._asking: list[tuple[Node, Message]] = []

    def asked(self, node: Node, question: Message) -> None:
        """A worker of `node` brings settings."""
        values, known = question["settings"], self._values
        started = self._spares_started()
        try:
            self.take(values)
        except ConfigError as error:
            node.post(_answer(question, str(error)))
            return
        if known is None:
            self._c.event("configured", ", ".join(f"{name} {value}" for name, value in values.items()))
            if self._c.settings.spares > started:
                self._warn(started)
        self._asking.append((node, question))
        self.settle()

    def take(self, values: dict[str, Any]) -> None:
        """Use `values` from now on. Raises ConfigError if they cannot be had, or are not the first."""
        if self._values is None:
            self._c.settings = self._c.settings.configured(values, _SOURCE)
            self._values = values
            self._c.checkpoints.forget()
            for node in self._c.nodes.values():
                self.tell(node)
        elif values != self._values:
            raise ConfigError(
                f"a worker brings the settings {values}, but another has brought {self._values}: "
                "all workers must bring the same, and only one set for the whole job"
            )

    def tell(self, node: Node) -> None:
        """Make an agent use them that does not yet."""
        if self._values is not None and node.holdings["configured"] != self._values:
            node.post({"type": "configured", "settings": self._values})

    def used(self, node: Node, message: Message) -> None:
        """An agent uses them."""
        node.holdings["configured"] = message["configured"]
        self.settle()

    def settle(self) -> None:
        """Answer those who ask, once the agents of all roles use the settings."""
        if not self._asking or not self._c.running:
            return
        playing = [self._c.nodes.get(name) for name in set(self._c.plan["roles"].values())]
        if any(node is None or node.holdings["configured"] != self._values for node in playing):
            return
        # The directory may be known only now; no role has begun to train without what is in it.
        durable = self._c.checkpoints.common(set(self._c.plan["roles"].values()))
        if durable is None or (durable and self._c.start_from(max(durable))):
            return
        for node, question in self._asking:
            node.post(_answer(question))
        self._asking.clear()

    def _spares_started(self) -> int:
        playing = set(self._c.plan["roles"].values())
        return max(self._c.settings.spares, len(set(self._c.nodes) - playing))

    def _warn(self, started: int) -> None:
        log.warning(
            "%s asks for %d spares; there are %d: bring more with `ftrun --join %s --job-dir %s` "
            "(on one machine, start them with `ftrun --standalone --spares`)",
            *(_SOURCE, self._c.settings.spares, started, self._c.settings.controller, self._c.job_dir),
        )


def _answer(question: Message, error: str = "") -> Message:
    answer = {"type": "answer", "worker": question["worker"], "id": question["id"]}
    return {**answer, "error": error} if error else answer

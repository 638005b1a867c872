"""Settings that the script brings at run time, when `ftrun` could not see them: one set for the whole job.

Every worker asks its agent for them, the agent the controller. The controller takes the first ones that can
be had and tells all agents, newcomers included; agents repeat them to a restarted controller. A worker gets
its answer once the agents of all roles use them: nothing is replicated by other settings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_core.control.cluster_state import ClusterState, Node
from ft_core.control.events import Effect, Peer, Send
from ft_core.errors import ConfigError
from ft_core.protocol.messages import Configure, ConfigureAnswer, UseSettings

log = logging.getLogger(__name__)

SOURCE = "the script's configuration"


@dataclass
class ScriptSettings:
    """What was brought, and the workers that wait for an answer."""

    values: Mapping[str, Any] | None = None
    asking: list[tuple[Peer, Configure]] = field(default_factory=list)

    def take(self, cluster: ClusterState, values: Mapping[str, Any]) -> bool:
        """Use `values` from now on. Returns whether they are news.

        Raises ConfigError if they cannot be had, or are not the first.
        """
        if self.values is None:
            cluster.settings = cluster.settings.configured(values, SOURCE)
            self.values = values
            return True
        if values != self.values:
            raise ConfigError(
                f"a worker brings the settings {values}, but another has brought {self.values}: "
                "all workers must bring the same, and only one set for the whole job"
            )
        return False

    def tell(self, node: Node) -> list[Effect]:
        """Make an agent use them that does not yet."""
        if self.values is None or node.holdings.configured == self.values:
            return []
        return [Send(node.peer, UseSettings(settings=dict(self.values)))]

    def used_by_all(self, cluster: ClusterState) -> bool:
        """Whether somebody waits, and the agents of all roles use the settings."""
        playing = (cluster.nodes.get(name) for name in cluster.roles_by_node)
        return bool(self.asking) and all(
            node is not None and node.holdings.configured == self.values for node in playing
        )

    def answer_all(self) -> list[Effect]:
        """Who waits may go on."""
        effects: list[Effect] = [Send(peer, answer(question)) for peer, question in self.asking]
        self.asking.clear()
        return effects


def answer(question: Configure, error: str = "") -> ConfigureAnswer:
    """To a worker's settings; `error`: why they cannot be had."""
    return ConfigureAnswer(worker=question.worker, id=question.id, error=error)


def spares_started(cluster: ClusterState) -> int:
    """Those that `ftrun` has started, or that have joined since."""
    return max(cluster.settings.spares, len(cluster.nodes.keys() - cluster.roles_by_node.keys()))


def warn_of_spares(cluster: ClusterState, started: int) -> None:
    """The script asks for more than there are."""
    log.warning(
        "%s asks for %d spares; there are %d: bring more with `ftrun --join %s --job-dir %s` "
        "(on one machine, start them with `ftrun --standalone --spares`)",
        *(SOURCE, cluster.settings.spares, started, cluster.settings.meeting, cluster.job_dir),
    )

"""Settings that the script brings at run time, when `ftrun` could not see them: one set for the whole job.

Every worker asks its agent for them, the agent the controller. The controller takes the first ones that can
be had and tells all agents, newcomers included; agents repeat them to a restarted controller. A worker gets
its answer once the agents of all roles use them: nothing is replicated by other settings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decisions import Decisions
from ft_core.control.events import Peer, Send
from ft_core.control.phases import Running
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.errors import ConfigError
from ft_core.protocol.messages import Configure, ConfigureAnswer, UseSettings

log = logging.getLogger(__name__)

SOURCE = "the script's configuration"


class ScriptSettings:
    """What was brought, and the workers that wait for an answer."""

    def __init__(self, recovery: RecoveryCoordinator, decisions: Decisions) -> None:
        self._recovery, self._decisions = recovery, decisions
        self._cluster, self._out = recovery.cluster, recovery.out
        self._values: Mapping[str, Any] | None = None
        self._asking: list[tuple[Peer, Configure]] = []

    def tell(self, node: Node) -> None:
        """Make an agent use them that does not yet."""
        if self._values is not None and node.holdings.configured != self._values:
            self._out.send(node, UseSettings(settings=dict(self._values)))

    def on_question(self, node: Node, question: Configure) -> None:
        """A worker of `node` brings settings."""
        started = _spares_started(self._cluster)
        try:
            news = self._use(question.settings)
        except ConfigError as error:
            self._out.send(node, _answer(question, str(error)))
            return
        if news:
            values = question.settings.items()
            self._out.record("configured", ", ".join(f"{name} {value}" for name, value in values))
            if self._cluster.settings.policy == "shrink" and self._cluster.plan is not None:
                self._out.emit(*self._recovery.samples.begin(self._cluster))
            if self._cluster.settings.spares > started:
                _warn_of_spares(self._cluster, started)
        self._asking.append((node.peer, question))
        self.answer_if_used()

    def on_use(self, values: Mapping[str, Any]) -> None:
        """An agent uses them already, of a former controller."""
        try:
            self._use(values)
        except ConfigError as error:
            self._recovery.end_job(1, str(error))

    def answer_if_used(self) -> None:
        """Answer the workers that brought settings, once the agents of all roles use them."""
        cluster = self._cluster
        if not isinstance(self._recovery.phase, Running) or not self._used_by_all():
            return
        # INV-13 (settings): no role trains before all use the same. The directory may be known only now: then
        # nobody has begun to train without what is in it.
        durable = self._decisions.ask_durable_versions(cluster.roles_by_node)
        untrained = cluster.versions.initial is None and not cluster.script.restart_epoch
        begins = untrained and cluster.script.started_from[1] != "durable"
        if durable is None or (begins and self._decisions.end_if_storage_unreadable()):
            return
        if durable and begins:
            version = max(durable)
            cluster.script.started_from = version, "durable"
            reason = f"training starts from the durable checkpoint of step {version}"
            self._recovery.end_epoch("configured", reason, [])
            return
        self._out.emit(*(Send(peer, _answer(question)) for peer, question in self._asking))
        self._asking.clear()

    def _use(self, values: Mapping[str, Any]) -> bool:
        """Use `values` from now on. Returns whether they are news.

        Raises ConfigError if they cannot be had, or are not the first.
        """
        if self._values is None:
            self._cluster.settings = self._cluster.settings.configured(values, SOURCE)
            self._values = values
            self._recovery.checkpoints = self._recovery.checkpoints.forgotten()
            for node in self._cluster.nodes.values():
                self.tell(node)
            return True
        if values != self._values:
            raise ConfigError(
                f"a worker brings the settings {values}, but another has brought {self._values}: "
                "all workers must bring the same, and only one set for the whole job"
            )
        return False

    def _used_by_all(self) -> bool:
        """Whether somebody waits, and the agents of all roles use the settings."""
        playing = (self._cluster.nodes.get(name) for name in self._cluster.roles_by_node)
        return bool(self._asking) and all(
            node is not None and node.holdings.configured == self._values for node in playing
        )


def _answer(question: Configure, error: str = "") -> ConfigureAnswer:
    """The answer to a worker's settings; `error`: why they cannot be had."""
    return ConfigureAnswer(worker=question.worker, id=question.id, error=error)


def _spares_started(cluster: ClusterState) -> int:
    """How many spares `ftrun` has started, or have joined since."""
    return max(cluster.settings.spares, len(cluster.nodes.keys() - cluster.roles_by_node.keys()))


def _warn_of_spares(cluster: ClusterState, started: int) -> None:
    """The script asks for more than there are."""
    log.warning(
        "%s asks for %d spares; there are %d: bring more with `ftrun --join %s --job-dir %s` "
        "(on one machine, start them with `ftrun --standalone --spares`)",
        *(SOURCE, cluster.settings.spares, started, cluster.settings.meeting, cluster.job_dir),
    )

"""What the parts of the machine share while an event is handled: its time, and the effects that it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import Close, Emitted, Record, Send
from ft_core.control.observe.observations import TimeGoes
from ft_core.protocol.messages import Epoch, Message


class Emitter:
    """Collects, in order, the effects of the event that is being handled."""

    def __init__(self, cluster: ClusterState, recorded: Mapping[str, Epoch]) -> None:
        """`recorded`: of events that come once an epoch, by name, the newest epoch that has them."""
        self.now = self.wall = 0.0
        """When the event came: in seconds for which this process was awake, and in all seconds. All limits
        are in the former: what it missed as it was stopped or held up is nobody else's fault."""
        self.effects: list[Emitted] = []
        self._cluster = cluster
        self._recorded = dict(recorded)

    def begin(self, now: float, wall: float) -> None:
        """Another event is handled. What is there of one that has failed is not carried out."""
        self.now, self.wall, self.effects = now, wall, []

    def emit(self, *effects: Emitted) -> None:
        """Let these follow what was emitted before."""
        self.effects += effects

    def send(self, node: Node, message: Message) -> None:
        """Send a message to one node."""
        self.emit(Send(node.peer, message))

    def close(self, node: Node) -> None:
        """End a node's connection."""
        self.emit(Close(node.peer))

    def send_to_all(self, message: Message) -> None:
        """Send a message to all nodes."""
        self.emit(*self._cluster.to_all(message))

    def record(
        self,
        name: str,
        reason: str = "",
        roles: Collection[int] = (),
        time: TimeGoes | None = None,
        **more: Any,
    ) -> None:
        """Write a line of `events.jsonl`. `time`: what the job's time goes to from here on, where that is
        said."""
        self.emit(Record(name, self._cluster.epoch, reason, tuple(roles), more, time))

    def record_once(self, name: str, reason: str = "", **more: Any) -> None:
        """Record what comes once an epoch: those who tell of it tell a restarted controller again."""
        if self.recorded_in(name) < self._cluster.epoch:
            self.note_recorded(name, self._cluster.epoch)
            self.record(name, reason, **more, time=TimeGoes())

    def recorded_in(self, name: str) -> Epoch:
        """The newest epoch in which that event was written down; 0 if it never was."""
        return self._recorded.get(name, 0)

    def note_recorded(self, name: str, epoch: Epoch) -> None:
        """Let the event count as written down in that epoch."""
        self._recorded[name] = epoch

    @property
    def recorded_epochs(self) -> Collection[Epoch]:
        """The epochs that are known to have been, by what is written down of them."""
        return self._recorded.values()

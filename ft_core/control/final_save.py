"""What is done before a job ends otherwise than by its scripts' end: the newest version goes to storage.

Workers leave their steps, nodes say what they hold, it is decided who writes what (`decide.last_version`),
and the nodes say whether they find all of it on storage. All of that within `Settings.shutdown_timeout`: the
end of a job waits no longer, and its exit code and its reason stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from ft_core.control.decide import last_version
from ft_core.control.decide.last_version import LastVersion
from ft_core.control.events import PrintConsole
from ft_core.control.observe import explain
from ft_core.control.phases import Saving
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.errors import Unrecoverable
from ft_core.protocol.checkpoint_names import parse
from ft_core.protocol.messages import VersionSaved

_HURRY = 0.25
"""The part of the time limit after which workers are ended that are still in their step."""


class FinalSave:
    """The last thing that one controller sees to."""

    def __init__(self, recovery: RecoveryCoordinator) -> None:
        self._recovery, self._cluster, self._out = recovery, recovery.cluster, recovery.out

    def advance(self, phase: Saving) -> None:
        """Do what can be done by now."""
        cluster, now = self._cluster, self._out.now
        if now >= phase.until:
            slow = f"it took longer than {phase.until - phase.since:g} s (--shutdown-timeout)"
            self._failed(phase, phase.unread or slow)
        elif phase.last is not None and not cluster.nodes.keys() >= set(phase.last.places.values()):
            phase.last = None  # who was to write is lost: others may hold the same
            self.advance(phase)
        elif phase.last is not None:
            self._order(phase, phase.last)
            self._verify(phase, phase.last)
        elif cluster.all_reported():
            self._begin(phase)
        elif not phase.hurried and now >= phase.since + _HURRY * (phase.until - phase.since):
            phase.hurried = True
            late = {name for name, node in cluster.nodes.items() if node.holdings.reported != cluster.epoch}
            self._recovery.kill_workers({r: name for r, name in cluster.places.items() if name in late})

    def on_saved(self, answer: VersionSaved) -> None:
        """A node has written a role's part, or could not."""
        phase = self._recovery.phase
        if not isinstance(phase, Saving) or phase.last is None or answer.epoch != self._cluster.epoch:
            return
        if answer.version != phase.last.version:
            return
        if answer.reason:
            self._failed(phase, f"role {answer.role}: {answer.reason}")
            return
        phase.left.discard(answer.role)
        if not phase.left:
            self._recovery.checkpoints = self._recovery.checkpoints.forgotten()
        self._recovery.decision_due = True

    def _begin(self, phase: Saving) -> None:
        """Decide what is to be written, and have it written, unless storage has it."""
        cluster = self._cluster
        try:
            last = last_version.choose(cluster)
        except Unrecoverable:
            self._failed(phase, "no version is whole in the memory of the nodes that are left")
            return
        if last is None:
            self._failed(phase, "all that is whole in the memory of the nodes is what the script begins with")
            return
        if cluster.settings.durable_dir:
            if (there := self._on_storage(phase, last)) is None:
                return
            if there and max(there) >= last.version:
                self._saved(phase, max(there), there[max(there)])
                return
        phase.last, phase.left, phase.told = last, set(last.places), {}
        self._order(phase, last)

    def _order(self, phase: Saving, last: LastVersion) -> None:
        """Tell each node what it has to write; once more over another connection, as that, or its answer, may
        have been lost with the one before."""
        nodes = self._cluster.nodes
        if all(phase.told.get(name) == nodes[name].peer for name in last.places.values()):
            return
        for name, order in last_version.orders(self._cluster, last).items():
            if phase.told.get(name) != nodes[name].peer:
                phase.told[name] = nodes[name].peer
                self._out.send(nodes[name], order)

    def _verify(self, phase: Saving, last: LastVersion) -> None:
        """Once all is written, see whether all nodes find it whole."""
        if phase.left or (there := self._on_storage(phase, last)) is None:
            return
        name = there.get(last.version, "")
        if name and parse(name).epoch == self._cluster.epoch:
            self._saved(phase, last.version, name)
        else:
            where = explain.place_of_last_version(self._cluster)
            self._failed(phase, f"{where} is no storage that all nodes see: give another --ft-durable-dir")

    def _on_storage(self, phase: Saving, last: LastVersion) -> Mapping[int, str] | None:
        """The checkpoints that all who have a part can read, by version; None until they have said. Who
        cannot look is asked again, as storage may be back in time."""
        checkpoints, nodes = self._recovery.checkpoints, self._cluster.nodes
        who = set(last.places.values())
        self._out.emit(*checkpoints.ask(nodes, who, self._out.now))
        if errors := [error for name, error in sorted(checkpoints.errors.items()) if name in who]:
            where = explain.place_of_last_version(self._cluster)
            phase.unread = f"{where} cannot be read: {'; '.join(errors)}"
            return None
        phase.unread = ""
        return checkpoints.common(who)

    def _saved(self, phase: Saving, version: int, name: str) -> None:
        said = explain.saved(self._cluster, version, name)
        self._out.record("saved", said, version=version)
        self._out.emit(PrintConsole(f"ftrun: {said}"))
        self._recovery.finish(phase.code, phase.reason)

    def _failed(self, phase: Saving, why: str) -> None:
        said = explain.not_saved(self._cluster, why)
        self._out.record("not_saved", said, version=phase.last.version if phase.last is not None else None)
        self._out.emit(PrintConsole(f"ftrun: {said}", "ERROR"))
        self._recovery.finish(phase.code, phase.reason)

"""What it means for the job that a role comes to the end of its script, or of a part of it.

| a role | as is said by | leads to |
|---|---|---|
| is at the end of a part | `Completed` | it waits; once all are, they are let go (`Release`) |
| is at the end of its script | `Finished` | once all are, the job is over |
| has ended without a word before it trained | `WorkerLost` | the same, unless others wait for it |
| waits in an operation for one at its end | `Issued` | they never meet: all begin anew |

How far the roles are is kept in `cluster.completion`. Other ends of a job, and what is saved before them, are
`RecoveryCoordinator.end_job` and `final_save`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ft_core.control.cluster.completion import Completion
from ft_core.control.cluster.node import Node
from ft_core.control.decide.ladder import EscalationCause
from ft_core.control.phases import Done, Forming, Running
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol import messages as m


class ScriptEnds:
    """The ends of the scripts of one job."""

    def __init__(self, recovery: RecoveryCoordinator) -> None:
        self._recovery, self._cluster, self._out = recovery, recovery.cluster, recovery.out

    @property
    def _completion(self) -> Completion:
        """How far the roles are, since the scripts were started last."""
        return self._recovery.completion

    def on_completed(self, end: m.Completed) -> None:
        """A role has come to the end of a part."""
        self._completion.on_completed(end)
        self._release_if_complete()

    def on_finished(self, role: int) -> None:
        """A role's script is done; perhaps it was the last one that others wait for at their end."""
        self._completion.finished.add(role)
        if not self._recovery.end_if_finished():
            self._release_if_complete()

    def on_left(self, role: int, where: str) -> None:
        """A role's process has ended without a word, and may have done all that was its. `where`: how that is
        said."""
        if not self._completion.released:
            self._completion.left[role] = where
        self.on_finished(role)
        self.escalate_if_waited_for()
        self._recovery.reconsider()

    def on_issued(self, answer: m.Issued) -> None:
        """A role says which operations it has begun."""
        if not isinstance(self._recovery.phase, Running):
            return  # of an epoch that is over
        if (found := self._completion.on_issued(answer, self._cluster.plan_epoch)) is not None:
            self._recovery.escalate(EscalationCause(found))

    def on_parts_known(self, nodes: Iterable[Node]) -> None:
        """A former controller may have let all workers leave a part of their scripts. Of those who have asked
        it for that, some may be lost since: it is known to the agents of the others."""
        cluster = self._cluster
        if isinstance(self._recovery.phase, Forming) or cluster.plan is None:
            return
        known = [n.holdings.parts for n in nodes if n.holdings.begun == cluster.plan.id]
        found = max(known, key=len, default=[])
        if len(found) > len(cluster.script.parts):
            self._release(found)

    def on_plan_taken_over(self) -> bool:
        """Another controller's plan counts from now on. Returns whether the job is over with it."""
        if self._recovery.end_if_finished():
            return True
        self.on_parts_known(self._cluster.nodes.values())
        self._release_if_complete()
        self._completion.taken_over()
        return False

    def tick(self) -> None:
        """Where some have left their script, ask all whether others wait for them."""
        cluster = self._cluster
        if not isinstance(self._recovery.phase, Running):
            return
        parts = len(cluster.script.parts)
        question = self._completion.question(cluster.places, cluster.plan_epoch, parts, self._out.now)
        if question is not None:
            self._out.send_to_all(question)

    def escalate_if_waited_for(self) -> None:
        """Connections that break show that somebody waits for who has left."""
        broke = self._recovery.failure_detector.broke
        missed = self._completion.missed(broke) if broke else None
        if missed is not None and not isinstance(self._recovery.phase, Done):
            self._recovery.escalate(EscalationCause(missed))

    def _release_if_complete(self) -> None:
        """Let the workers leave a part of their scripts, once all have come to the end of it."""
        cluster = self._cluster
        if not isinstance(self._recovery.phase, Running):
            return
        if parts := self._completion.passed(cluster.places, cluster.plan_epoch, cluster.script.parts):
            self._release(parts)

    def _release(self, parts: list[int]) -> None:
        """Let the workers leave these parts."""
        self._cluster.script.parts = parts
        self._out.send_to_all(m.Release(parts=parts))

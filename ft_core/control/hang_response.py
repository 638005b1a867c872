"""What is done where nothing moves any more: who holds the others up gets another worker in its place."""

from __future__ import annotations

import logging

from ft_core.control.decide.ladder import EscalationCause
from ft_core.control.liveness.hangs.detector import Culprit, Detector, Inconclusive, Stalled
from ft_core.control.liveness.hangs.finding import Finding
from ft_core.control.observe.observations import FirstSign
from ft_core.control.phases import Running
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol import messages as m

log = logging.getLogger(__name__)

NEVER_MEET = ("mismatch", "circle")
"""Kinds of hangs in which it is proven that roles never meet again, whoever is to blame."""


class HangResponse:
    """Acts on what the detector finds."""

    def __init__(self, recovery: RecoveryCoordinator, detector: Detector) -> None:
        self._recovery, self._detector = recovery, detector
        self._cluster, self._out = recovery.cluster, recovery.out

    def tick(self) -> None:
        """Look whether anything moves, and do something about it where nothing does."""
        recovery, out = self._recovery, self._out
        on_its_own = recovery.protection.unprotected or recovery.completion.released
        if not isinstance(recovery.phase, Running) or on_its_own:
            self._detector.rests(out.now)
            return
        verdict = self._detector.tick(self._cluster, recovery.progress, out.now)
        if isinstance(verdict, m.SendFlight):
            out.send_to_all(verdict)
        elif isinstance(verdict, Culprit):
            self._kill_hung_workers(verdict.finding)
        elif isinstance(verdict, Stalled):
            found = verdict.finding
            log.warning("others wait for what is no hang, and nothing is replaced: %s", found.words)
            out.record("stalled", found.words, found.roles)
        elif isinstance(verdict, Inconclusive):
            self._escalate(verdict)

    def _escalate(self, verdict: Inconclusive) -> None:
        """Nobody can be replaced: it is not clear who is to blame, or none of them is."""
        found, settings = verdict.finding, self._cluster.settings
        self._tell_when_it_began()
        log.warning("nothing moves, and it is not clear who is to blame: %s", found.words)
        self._out.record("hang", f"not explained: {found.words}", found.roles, explained=False)
        if verdict.hopeless:
            limit = settings.hang_limit
            reason = f"nothing has moved for --ft-hang-limit, {limit:g} s: {found.words}"
            self._recovery.escalate(EscalationCause(reason))
        elif found.kind in ("transport", "silent"):
            cluster = self._cluster
            roles = {*found.roles, found.witness} & cluster.places.keys()
            stuck = {cluster.places[role] for role in roles}
            self._recovery.failure_detector.stuck(stuck, self._out.now)
        elif found.kind in NEVER_MEET and settings.max_restarts:
            incompatible = () if found.culprits else found.roles  # culprits have begun anew, in vain
            reason = f"roles will never meet again: {found.words}"
            self._recovery.escalate(EscalationCause(reason), incompatible)

    def _kill_hung_workers(self, found: Finding) -> None:
        """Workers that hang are as good as dead: from here on it is a crash like any other."""
        log.error("%s: replaced, for it holds the others up", found.words)
        self._tell_when_it_began()
        self._out.record("hang", found.words, found.culprits, explained=True)
        for role in [*found.culprits, *([found.witness] if found.witness >= 0 else [])]:
            node = self._cluster.nodes.get(self._cluster.places[role])
            if node is not None and (beat := node.beats.get(role)) is not None:
                self._out.send(node, m.Examine(role=role, pid=beat.pid, end=role in found.culprits))

    def _tell_when_it_began(self) -> None:
        self._out.emit(FirstSign(self._out.wall - self._detector.quiet(self._out.now)))

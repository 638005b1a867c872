"""What is told of a job beside what is decided: where its time goes, what is counted, what the console says.

It reads what the machine emits, in order, once for each event; nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, assert_never

from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import Effect, Emitted, Record, Send
from ft_core.control.observe.goodput import Account
from ft_core.control.observe.job_metrics import JobMetrics
from ft_core.control.observe.observations import (
    AllRestored,
    AllStepped,
    FailureCounted,
    FirstSign,
    NodeBeat,
    Observation,
    PartWritten,
    ScriptsDone,
    StepDone,
    TakenOver,
    TimeGoes,
)
from ft_core.control.observe.story import Story
from ft_core.control.phases import Done, Phase, Rebuilding
from ft_core.protocol.goodput import Cause, in_words

GOODPUT = 60.0
"""Seconds of the wall clock, at most, between two events that say what the job's time went to; a step may be
longer."""


class Observer:
    """One controller's."""

    def __init__(self, account: Account, wall: float) -> None:
        self.account = account
        self.metrics = JobMetrics()
        self._story = Story()
        self._wall = wall
        self._cut: dict[Cause, float] = {}
        """Time that was cut off of a step, or went to something else than was known, and that no event has
        said yet."""
        self._told = account.now, wall
        """What the newest event says that time goes to, and when that was."""

    def read(
        self, emitted: Iterable[Emitted], cluster: ClusterState, phase: Phase, now: float, wall: float
    ) -> list[Effect]:
        """Return what an event has led to, for the shell: records are completed, and what the console says is
        last."""
        self._wall = wall
        effects: list[Effect] = []
        told: list[Record] = []
        for each in emitted:
            if type(each) is Send:  # a hundred thousand at a time
                effects.append(each)
            elif isinstance(each, Observation):
                self._observe(each)
            elif isinstance(each, Record):
                told.append(self._complete(each, cluster))
                effects.append(told[-1])
            else:
                effects.append(each)
        if not isinstance(phase, Rebuilding | Done) and self._is_due():
            effects.append(self._complete(Record("goodput", cluster.epoch, time=TimeGoes()), cluster))
        return effects + self._story.tell(told, cluster, phase, now, wall)

    def _is_due(self) -> bool:
        """Whether an event is to say what time goes to: now and then, and where no other has."""
        (cause, told), account = self._told, self.account
        due = self._wall - told >= GOODPUT and (not account.trains or account.open(self._wall) < 1e-6)
        return due or account.now is not cause

    def _complete(self, record: Record, cluster: ClusterState) -> Record:
        """Add what is known here of what has come to pass."""
        about: dict[str, Any] = {}
        reason = record.reason
        if record.event == "suspected":
            self.account.wrong(self._wall)
        elif record.event == "begins_anew":
            self.metrics.rungs[record.more["rung"]] += 1
        elif record.event == "resumed":
            self.metrics.resumed(self.account.seconds, cluster.current_plan.origin, self._wall)
            reason = self._story.recovered(record.more["version"], self._wall)
        if record.time is not None:
            about = self._time(record.time)
            if record.event == "detected":
                self.metrics.noticed(self.account.seconds, about.get("unfinished", {}), self._wall)
            elif record.event == "goodput":
                reason = in_words(self.account.seconds)
        return replace(record, reason=reason, more={**record.more, **about}, time=None)

    def _time(self, goes: TimeGoes) -> dict[str, Any]:
        """What a record says of the job's time."""
        account = self.account
        if goes.cause is not None or not account.trains:
            self._cut_off(account.to(goes.cause or account.now, self._wall, goes.epoch, goes.between_steps))
        about: dict[str, Any] = {"spent": account.spent(self._wall)}
        if self._cut:
            about["unfinished"], self._cut = self._cut, {}
        self._told = account.now, self._wall
        return about

    def _cut_off(self, seconds: Mapping[Cause, float]) -> None:
        """Keep what was cut off of steps for the next record that says what time goes to."""
        for cause, more in seconds.items():
            self._cut[cause] = self._cut.get(cause, 0.0) + more

    def _observe(self, observed: Observation) -> None:
        account, metrics, wall = self.account, self.metrics, self._wall
        match observed:
            case NodeBeat(node, before, beat, taking_part, newest):
                metrics.beat(before, beat.roles)
                metrics.erred(node, beat.xids)
                self._count_steps(lambda: account.heard(taking_part, newest, wall))
            case StepDone(version):
                self._count_steps(lambda: account.stepped(version, wall))
            case AllRestored(epoch, version, share):
                account.begins(epoch, version, share)
            case AllStepped(version):
                self._count_steps(lambda: self._cut_off(account.resumes(version, wall)))
            case FirstSign(since):
                account.wrong(since)
            case TimeGoes(cause, epoch, between_steps):
                self._cut_off(account.to(cause or account.now, wall, epoch, between_steps))
            case TakenOver(found, restoring):
                self._cut_off(account.taken_over(found, restoring, wall))
            case ScriptsDone():
                account.finished(wall)
            case FailureCounted(fault, place, domain):
                metrics.failed(fault, place, domain)
            case PartWritten(seconds, whole):
                metrics.written(seconds, whole, wall)
            case _:
                assert_never(observed)

    def _count_steps(self, account: Callable[[], None]) -> None:
        before = self.account.version
        account()
        if (steps := self.account.version - before) > 0:
            self.metrics.steps.add(self.account.step or self.account.pace.usual, steps)

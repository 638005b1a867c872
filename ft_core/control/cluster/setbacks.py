"""What has failed since training came further, and how far the ladder was climbed for that."""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.protocol.messages import Plan


@dataclass
class Setbacks:
    """The setbacks of one job."""

    attempts_without_progress: int = 0
    """Failures since a step was done that is newer than `progress_mark`."""
    progress_mark: int = 0
    """The newest version when something failed last; 0 once the job has started over, so that its steps count
    again."""
    escalation_level: int = 0
    """How far the ladder was climbed since there was progress, see `control.decide.ladder`."""
    furthest_step: int = 0
    """The newest version that was ever there when something failed: a step beyond it lets the ladder begin
    anew."""

    def note_progress(self, newest: int) -> None:
        """Something has failed: was there a step since that nobody had done before? `newest`: the newest
        version that any role is known to have had."""
        if newest > self.progress_mark:  # the failure is the first that comes after it
            self.attempts_without_progress = min(self.attempts_without_progress, 1)
            self.progress_mark = newest
        if newest > self.furthest_step:
            self.escalation_level, self.furthest_step = 0, newest

    def take(self, plan: Plan) -> None:
        """Take over what another controller knew."""
        self.attempts_without_progress = plan.attempts_without_progress
        self.progress_mark = plan.progress_mark
        self.escalation_level = plan.escalation_level
        self.furthest_step = plan.furthest_step

    def forget(self) -> None:
        """The job starts over: its first steps are progress."""
        self.progress_mark = 0

"""What a job's time goes to, as events and leaders' notes say it: every second is one `Cause`'s."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from ft_core.protocol.messages import Epoch, Version


class Cause(StrEnum):
    """What a second of a job went to."""

    PRODUCTIVE = "productive"
    """Steps that are new, and what the script does between them."""
    DEGRADED = "degraded"
    """The same time's share of the replica groups that were away: with one of four, a quarter of it."""
    SAVING = "saving"
    """Steps waited for their state to be copied (commit wait)."""
    REDONE = "redone"
    """Steps that were done again, and what was cut off of a step by the end of an epoch."""
    START_UP = "start_up"
    """From the job's beginning, or from the scripts' when all were started again, to the first step's end."""
    DETECTION = "detection"
    """From the first sign of a failure (the last word of a node that was lost, a connection that broke, the
    last movement before a hang) until it was taken for one."""
    DECISION = "decision"
    """Workers left their step, nodes said what they hold, and it was decided how to go on."""
    WAITING = "waiting"
    """For a node: to play a role that nobody plays, or to be seen again."""
    RESTORING = "restoring"
    """From the decision until all roles had their state, and were where they could do a step."""
    UNKNOWN = "unknown"
    """Nobody was looking, or the script runs without fault tolerance."""


class Spent(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the time of a job was spent, until some moment."""

    now: Cause
    """What its time goes to from then on; `PRODUCTIVE` stands for all that training is."""
    seconds: dict[Cause, float] = field(default_factory=dict)
    """Until then, but for those of which it is 0. With `open` their sum is the wall clock."""
    epoch: Epoch = 0
    """The one that was decided on last."""
    version: Version = 0
    """Steps that are done, in it."""
    reached: Version = 0
    """The same in any: what is below is done again."""
    share: float = 1.0
    """The share of the replica groups that takes part."""
    step: float = 0.0
    """Seconds that a step has taken last; 0 before any."""
    redone: float = 0.0
    """Seconds of the epoch in which steps were done again, but for its first."""
    waited: float = 0.0
    """Seconds of the epoch in which steps waited for copies, but for its first."""
    open: float = 0.0
    """Seconds, the last ones, that are in none of these: of a step that is under way."""


def in_words(seconds: Mapping[Cause, float]) -> str:
    """For people: the productive part of the whole, and what the rest went to, the most first."""
    whole = sum(seconds.values())
    lost = sorted(((s, cause) for cause, s in seconds.items() if cause is not Cause.PRODUCTIVE), reverse=True)
    part = seconds.get(Cause.PRODUCTIVE, 0.0) / whole if whole else 0.0
    rest = ", ".join(f"{cause.replace('_', '-')} {s:.1f} s" for s, cause in lost if s >= 0.05)
    return f"{100 * part:.1f} % of {whole:.1f} s productive" + (f"; {rest}" if rest else "")

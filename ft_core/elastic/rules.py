"""Elastic replica groups (FT-HSDP, sections 4 and 5): who takes part in a step, and who trains which samples.

Pure rules that every role and the controller apply alike, so that nobody has to tell anybody the outcome.

A group that leaves or comes back does so with an epoch, which starts from a version v. From step v + 1 on
the exchange has the new members. Which samples a group takes changes `AHEAD` steps later, because scripts
draw their batches ahead: a role can have drawn those of step v + 2 when it hears of the epoch (it had
finished step v + 1 then, so all had passed the barrier of v + 1, and v is the oldest version to start from).
So a group that comes back takes part without samples first, with a zero gradient; and what was dealt to a
group that is gone is dealt again, a few steps later, to those who remain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from ft_core.protocol.groups import roles_in, runs_of, text_of
from ft_core.protocol.messages import Dealt, MembershipChanges, Redundancy, ReplicaGroup

AHEAD = 2
"""Steps after the first version of an epoch whose samples are dealt as the epoch before would have."""

_KEPT = 64
"""Changes that are written down without counting their groups again."""

INTERVENTIONS = ("sqrt", "linear", "none")

Range = tuple[int, int]
"""Positions of samples in the order of the training data: first, and one past the last."""


def lr_factor(intervention: str, live: int, full: int) -> float:
    """What the learning rate is multiplied by while `live` of `full` groups train (FT-HSDP, section 6.2).

    `sqrt` keeps it proportional to the standard deviation of the gradient's noise; `linear` goes by the
    amount of data; `none` leaves it alone. Exactly 1.0 with all groups, 0.0 when nobody has any samples: the
    only group that had some has left in the step after another came back.
    """
    if intervention not in INTERVENTIONS:
        raise ValueError(f"LR intervention {intervention!r}: give {', '.join(INTERVENTIONS)}")
    if not live:
        return 0.0
    if live == full or intervention == "none":
        return 1.0
    return live / full if intervention == "linear" else math.sqrt(live / full)


@contextmanager
def intervened(param_groups: Sequence[dict[str, Any]], factor: float) -> Iterator[None]:
    """Step with the learning rate times `factor`; after it, every group's is what it was, to the bit."""
    changed = param_groups if factor != 1.0 else ()
    rates = [group["lr"] for group in changed]
    for group in changed:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(changed, rates, strict=True):
            group["lr"] = rate


CHANGES = 128
"""The most changes of who takes part that are known: plans have them, and a job that lives for months has
thousands. Nobody goes back to before so many."""
PAST = 32
"""Steps that a deal can tell of again, at the least, and twice as many at the most."""
TELLERS = 8
"""Replica groups that tell the controller of a step's samples; all know the same."""


def tellers(there: Sequence[int]) -> set[int]:
    """Those that do, of the groups that take part: far from each other, so that hardly anything takes all."""
    return {there[place * len(there) // TELLERS] for place in range(TELLERS)} if there else set()


@dataclass(frozen=True)
class Membership:
    """The replica groups of a job over its steps.

    `groups` is how many there are when all are there. `changes`, oldest first: (version, those who take part
    in the steps after it).
    """

    groups: int
    changes: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, found: MembershipChanges) -> Membership:
        """Inverse of `value`."""
        return cls(found.groups, tuple((since, tuple(_members(text))) for since, text in found.changes))

    def value(self) -> MembershipChanges:
        """The changes as plans have them."""
        return MembershipChanges(
            self.groups, tuple((since, _text(members)) for since, members in self.changes)
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Membership:
        """Inverse of `to_json`. Raises ValueError for anything else."""
        return cls.of(msgspec.convert(data, MembershipChanges))

    def to_json(self) -> dict[str, Any]:
        """The changes as the ledger has them."""
        found: dict[str, Any] = msgspec.to_builtins(self.value())
        return found

    def changed(self, version: int, members: Iterable[int]) -> Membership:
        """An epoch starts from `version` with `members`; what was to come after that version is void."""
        kept = tuple(change for change in self.changes if change[0] < version)[1 - CHANGES :]
        now, members = Membership(self.groups, kept), tuple(sorted(members))
        if members == now.taking_part(version + 1):
            return now
        return Membership(self.groups, (*kept, (version, members)))

    def taking_part(self, step: int) -> tuple[int, ...]:
        """The groups that exchange gradients in `step` (counted from 1)."""
        return self._at(step - 1)

    def dealt(self, step: int) -> tuple[int, ...]:
        """The groups among which the samples of `step` are dealt."""
        return self._at(step - 1 - AHEAD)

    def contributing(self, step: int) -> tuple[int, ...]:
        """The groups whose gradients count in `step`: they have samples, and are there."""
        there = self.taking_part(step)
        return tuple(g for g in self.dealt(step) if g in there)

    def gradient_scale(
        self, step: int, group: int, factor: float = 1.0, counted: int | None = None
    ) -> float | None:
        """What a group's gradient is multiplied by, so that the mean is over those that count in `step`.

        The framework multiplies it by `factor` to have the mean over all groups, or over `counted` of them.
        None: this group's does not count, since it has come back and was not dealt any samples yet. It takes
        part with a zero gradient, whatever it was (infinity times 0 is not 0), which brings it to the
        state of the others (FT-HSDP, sections 4.2 and 4.3).
        """
        contributing = self.contributing(step)
        if group not in contributing:
            return None
        counted = self.groups if counted is None else counted
        return factor if counted == len(contributing) else factor * counted / len(contributing)

    def settled(self, step: int) -> bool:
        """Whether all groups are there, and have been for so long that no samples wait to be dealt again.

        Told from the changes alone, so that roles which read no data know it as well. A group leaves at most
        `AHEAD` steps' samples behind, and each step deals as much as a group takes, or more.
        """
        since = self.changes[-1][0] if self.changes else -math.inf
        everybody = len(self.taking_part(step)) == self.groups
        return everybody and step > since + AHEAD * (self.groups + 2)

    def _at(self, version: int) -> tuple[int, ...]:
        for since, members in reversed(self.changes):
            if since <= version:
                return members
        return tuple(range(self.groups))


@lru_cache(maxsize=_KEPT)
def _text(groups: tuple[int, ...]) -> str:
    return text_of(runs_of(groups))


def _members(groups: str) -> Iterator[int]:
    return (group for run in roles_in(groups) for group in run)


@dataclass(frozen=True)
class Start:
    """Which roles a job has that starts with some of its replica groups; the others join when nodes do.

    Before scripts run nobody knows what the replica groups are. Ranks are taken to be numbered so that each
    of `stages` equal ranges of them has its part of every group, one group after the other. Whether these are
    a model's pipeline stages depends on the framework's order of ranks, and its adapter says so. `there`
    counts the roles of each range that start.
    """

    roles: int
    stages: int
    there: int

    @property
    def present(self) -> list[int]:
        """The roles that start."""
        return [role for role in range(self.roles) if self._place(role) < self.there]

    def counterpart(self, role: int) -> int:
        """A role that starts, in the same place of another group as this one, which is missing."""
        return role - self._place(role) + self._place(role) % self.there

    def group(self, role: int, groups: int) -> int:
        """The replica group of a role, of so many."""
        return self._place(role) * groups * self.stages // self.roles

    def membership(self, groups: int) -> Membership:
        """Who takes part from the first step on."""
        here = tuple(sorted({self.group(role, groups) for role in self.present}))
        return Membership(groups, ((-AHEAD, here),) if len(here) < groups else ())

    def objection(self, found: ReplicaGroup, role: int, version: int) -> str:
        """Why the job cannot begin with `version` without the replica groups that are missing, if so.

        `found`: that of `role`, as the framework has it.
        """
        group, groups = found.index, found.groups
        missing = self.roles - len(self.present)
        if not missing:
            return ""
        if self.group(role, groups) != group or missing * groups % self.roles:
            return (
                f"role {role} is in replica group {group} of {groups}, unlike --nnodes MIN:MAX expects: "
                f"MIN nodes must hold whole groups, which follow each other in each of {self.stages} "
                "pipeline stages. Give --ft-pipeline-stages if there are more or less of these in the order "
                "of ranks, or start with all nodes"
            )
        if not found.may_leave:
            return (
                "this job shares one sharded state that others cannot adopt, so it cannot start without some "
                "replica groups: give --nnodes one number"
            )
        if found.redundancy is Redundancy.ADOPTABLE and version:
            return (
                "the optimizer is sharded over all replica groups, and what missing ones have of step "
                f"{version} is in a checkpoint that only they read: start with all nodes"
            )
        return ""

    def _place(self, role: int) -> int:
        return role % (self.roles // self.stages)


class _Past(NamedTuple):
    """Steps in a row, by what was dealt before them."""

    version: int
    next: int
    waiting: list[list[int]]
    turns: list[int]
    """How many were dealt in each step."""


@dataclass
class Deal:
    """Deals samples in the order of the data, each exactly once, `turn` at a time to each group.

    With all groups there, samples are dealt as frameworks deal them: in turns of a micro batch, in the order
    of the groups. What was dealt to groups that left goes first, from `AHEAD` + 1 steps later on. The state
    is the same on all roles, and travels with snapshots.
    """

    turn: int
    next: int = 0
    """The first position that was never dealt."""
    waiting: list[list[int]] = field(default_factory=list)
    """[first step in which they may be dealt, first, end] of samples that were dealt in vain."""
    dealt: dict[int, list[Range]] = field(default_factory=dict)
    """What the step under way has been dealt so far, by group."""
    _past: list[_Past] = field(default_factory=list, compare=False)
    """What was dealt before the last steps, and how often in each: their samples follow from it."""
    _turns: int = field(default=0, compare=False)
    """How many turns the step under way has been dealt."""

    def take(self, step: int, membership: Membership) -> dict[int, list[Range]]:
        """Deal one more turn of `step`: by group, `turn` samples each."""
        self._note_the_past(step)
        self._turns += 1
        turn = {group: self._draw(step, self.turn) for group in membership.dealt(step)}
        for group, ranges in turn.items():
            held = self.dealt.setdefault(group, [])
            for first, end in ranges:
                if held and held[-1][1] == first:
                    held[-1] = (held[-1][0], end)
                else:
                    held.append((first, end))
        return turn

    def take_for(self, group: int, step: int, membership: Membership) -> list[int]:
        """`take`, and the positions that a role of `group` reads.

        One that is not dealt any takes part with a zero gradient: it reads what the first one does.
        """
        turn = self.take(step, membership)
        return positions(turn.get(group) or next(iter(turn.values())))

    def copy(self) -> Deal:
        """A copy of the deal as it is between two steps."""
        return Deal.from_json(self.to_json())

    def ledger_entry(self, step: int, membership: Membership) -> Dealt:
        """`step_done`: what the ledger is to know of the step."""
        trained = self.step_done(step, membership)
        waiting = [(since, first, end) for since, first, end in self.waiting]
        return Dealt({group: list(ranges) for group, ranges in trained.items()}, waiting, self.next)

    def entries_after(self, version: int, membership: Membership) -> Iterator[tuple[int, Dealt]]:
        """`ledger_entry` again, with its step, of each step after `version` that is done and still known.

        What a step trained follows from what was dealt before it and from who took part: so whoever has the
        newest state can tell, though all who trained before are lost.
        """
        known = [past for past in self._past if past.version <= version][-1:] or self._past[:1]
        for past in known:
            deal = Deal(self.turn, past.next, _pieces(past.waiting))
            later = (each.turns for each in self._past if each.version >= past.version)
            for step, turns in enumerate(chain.from_iterable(later), past.version + 1):
                for _ in range(turns):
                    deal.take(step, membership)
                entry = deal.ledger_entry(step, membership)
                if step > version:
                    yield step, entry

    def step_done(self, step: int, membership: Membership) -> dict[int, list[Range]]:
        """The step is complete: by group, what was trained in it. The rest waits."""
        self._note_the_past(step)
        self._past[-1].turns.append(self._turns)
        self._turns = 0
        trained = {g: ranges for g, ranges in self.dealt.items() if g in membership.contributing(step)}
        for group in sorted(set(self.dealt) - set(trained)):
            self.waiting += [[step + AHEAD + 1, first, end] for first, end in self.dealt[group]]
        self.dealt = {}
        return trained

    def to_json(self) -> dict[str, Any]:
        """At the end of a step: for the snapshot's envelope."""
        past = [[p.version, p.next, _pieces(p.waiting), list(p.turns)] for p in self._past]
        return {
            "turn": self.turn,
            "next": self.next,
            "waiting": [list(w) for w in self.waiting],
            "past": past,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Deal:
        """Inverse of `to_json`, also of what has no past."""
        past = [
            _Past(int(at), int(to), _pieces(of), list(turns)) for at, to, of, turns in data.get("past", ())
        ]
        return cls(int(data["turn"]), int(data["next"]), _pieces(data["waiting"]), _past=past)

    def _note_the_past(self, step: int) -> None:
        if not self._turns and (not self._past or len(self._past[-1].turns) >= PAST):
            self._past = [*self._past[-1:], _Past(step - 1, self.next, _pieces(self.waiting), [])]

    def _draw(self, step: int, count: int) -> list[Range]:
        drawn: list[Range] = []
        for piece in self.waiting:
            if count and piece[0] <= step:
                size = min(count, piece[2] - piece[1])
                drawn.append((piece[1], piece[1] + size))
                piece[1] += size
                count -= size
        self.waiting = [piece for piece in self.waiting if piece[1] < piece[2]]
        if count:
            drawn.append((self.next, self.next + count))
            self.next += count
        return drawn


def _pieces(waiting: Iterable[Sequence[int]]) -> list[list[int]]:
    return [list(map(int, piece)) for piece in waiting]


def stand_in(role: int, peers: Sequence[int], absent: Collection[int]) -> int:
    """Who writes what `role` writes for all (a log, a checkpoint): itself, or the next of its data-parallel
    `peers` whose replica group is there."""
    at = peers.index(role)
    return next(peer for peer in (*peers[at:], *peers[:at]) if peer not in absent)


def positions(ranges: Iterable[Range]) -> list[int]:
    """Every position of `ranges`, in order."""
    return [at for first, end in ranges for at in range(first, end)]

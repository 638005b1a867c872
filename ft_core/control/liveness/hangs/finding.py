"""Who is to blame for a hang: read from the flight records of all roles, as far as they are there.

Whoever waits for nobody, while others wait for it, holds them up. What cannot be explained so is said, and
nobody is accused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from ft_core.control.liveness.hangs.divergence import diverged
from ft_core.control.liveness.hangs.graph import Waits
from ft_core.control.liveness.hangs.operations import (
    BLOCKED,
    STOPPED,
    TRACED,
    Flight,
    Operation,
    in_words,
    roles_in_words,
)
from ft_core.control.liveness.hangs.waiting import Wait
from ft_core.protocol.domains import place
from ft_core.protocol.flight import FlightLog

SUSPECTS = 3
"""Roles that are named, at most."""
_STATES = {
    "R": "it runs, outside of any operation (state R)",
    "S": "it waits for something else (state S)",
    BLOCKED: "it waits for storage or a device (state D)",
    STOPPED: "it is stopped (state T)",
    TRACED: "a debugger holds it (state t)",
    "Z": "it has ended (state Z)",
}


@dataclass(frozen=True)
class Finding:
    """What holds the roles up. `roles`: who may be to blame, the likeliest first. `sure`: of how many of
    them that is certain. `witness`: a role that waits, or -1. `waited`: seconds for which it has. `usual`:
    how many the same wait took before, at most; None: it was never seen. `proven`: it will never end, however
    long others wait."""

    kind: str
    roles: tuple[int, ...]
    sure: int
    words: str
    witness: int = -1
    waited: float = 0.0
    usual: float | None = None
    proven: bool = False

    @property
    def culprits(self) -> tuple[int, ...]:
        """The roles that are certainly to blame."""
        return self.roles[: self.sure]


class Case:
    """The records of one moment."""

    def __init__(
        self,
        logs: Collection[FlightLog],
        places: Mapping[int, str],
        held_up: Collection[int] = (),
        unusual: Container[Operation] = (),
    ) -> None:
        """`logs`: of the epoch under way. `places`: the nodes of all roles that take part. `held_up`: roles
        that wait for copies of their state to be safe. `unusual`: operations whose time says nothing of what
        is usual."""
        self.flights = {log.role: Flight(log) for log in logs if log.role in places}
        self.places, self.held_up, self._unusual = places, frozenset(held_up), unusual
        self.excused: Mapping[int, Wait] = {}
        self.waits = Waits.of(self.flights, places.keys())

    def explain(self, excused: Mapping[int, Wait] | None = None) -> Finding | None:
        """None: nobody waits for anybody, and nobody is stopped. `excused`: roles that are known to wait for
        what ends by itself: they are not to blame."""
        self.excused = excused or {}
        ends = self.waits.ends()
        leaves = [role for end in ends if len(end) == 1 for role in end]
        stopped = [role for role, flight in self.flights.items() if flight.log.state == STOPPED]
        if stopped:
            return self._stopped(stopped)
        if (found := self._mismatch()) is not None:
            return found
        if leaves:
            return self._absent(leaves)
        if circles := [end for end in ends if len(end) > 1]:
            return self._circle(max(circles, key=len))
        return self._transport() if self.waits.stuck else None

    def alone(self) -> Finding:
        """Nobody waits for anybody: each role is busy with itself, for longer than it should."""
        ranked = self._ranked(list(self.places))
        return self._about("alone", ranked, 0, "no role waits for another, and none begins an operation")

    # -- kinds -------------------------------------------------------------------------------------

    def _stopped(self, roles: Sequence[int]) -> Finding:
        ranked = self._ranked(roles)
        return self._about("stopped", ranked, len(ranked))

    def _absent(self, leaves: Sequence[int]) -> Finding:
        """Roles that wait for nobody."""
        ranked = self._ranked(leaves)
        excused = {
            "left": [role for role in ranked if role in self.flights and self.flights[role].log.at_end],
            "silent": [role for role in ranked if role not in self.flights],
            "held up": [role for role in ranked if role in self.held_up],
            "waits": [role for role in ranked if role in self.excused],
            "blocked": [role for role in ranked if self._state(role) == BLOCKED],
            "traced": [role for role in ranked if self._state(role) == TRACED],
        }
        without = {role for roles in excused.values() for role in roles}
        if len(without) == len(ranked):
            return self._about(next(kind for kind, roles in excused.items() if roles), ranked, 0)
        ranked = [role for role in ranked if role not in without]
        if len(ranked) > 1 and (shared := self._shared(ranked)) is not None:
            return self._transport(shared)
        return self._about("absent", ranked, len(ranked) if len(ranked) <= SUSPECTS else 0)

    def _circle(self, roles: frozenset[int]) -> Finding:
        """The finding that roles wait for each other."""
        pivots = self.waits.pivots(roles)
        suspects = pivots or sorted(roles)  # of one role's fault all circles go through it
        strange = diverged(self.flights, suspects)
        free = [role for role in suspects if not self.flights[role].waits_for_sure]
        for found in (strange.one, pivots, free):
            if len(found) == 1:
                ranked = list(dict.fromkeys([*found, *strange.roles, *pivots]))
                return self._about("circle", ranked, 1, self._round(roles))
        ranked = list(dict.fromkeys([*strange.roles, *pivots, *sorted(roles)]))
        circle = self._about("circle", ranked, 0, self._round(roles))
        return replace(circle, proven=not free)  # where none has only begun what it is in

    def _mismatch(self) -> Finding | None:
        """Roles that do different things in what should be one operation."""
        for operation in sorted(self.waits.waiting, key=lambda each: (each.number, each.group)):
            here = {
                role: self.flights[role].about(operation)
                for role in operation.roles
                if role in self.flights and operation in self.flights[role].records
            }
            kinds = Counter(here.values())
            if len(kinds) < 2:
                continue
            (common, most), (_, second) = kinds.most_common(2)
            few = [role for role, what in here.items() if what != common]
            if most > second and len(few) < most:
                ranked, sure = few, len(few) if len(few) <= SUSPECTS else 0
            else:
                strange = diverged(self.flights, here)
                sure = len(strange.one)
                ranked = [*strange.roles, *(role for role in here if role not in strange.roles)]
            return self._differ(operation, here, ranked, sure)
        return None

    def _transport(self, operation: Operation | None = None) -> Finding:
        """All have entered, and it does not end."""
        operation = operation or max(self.waits.stuck, key=self._longest)
        waiting = sorted(self.waits.waiting[operation])
        if len(unseen := [role for role in waiting if self.flights[role].unseen(operation)]) == 1:
            here = {role: self.flights[role].sized(operation) for role in waiting}
            return self._differ(operation, here, [*unseen, *(set(waiting) - set(unseen))], 1)
        ended = [role for role in operation.roles if role in self.flights and role not in waiting]
        words = (
            f"all have entered {in_words(operation, self.flights[waiting[0]])}, and for "
            f"{roles_in_words(waiting)} it has not ended in {self._longest(operation):.1f} s"
            + (f" (it has for {roles_in_words(ended)})" if ended else "")
            + ": a connection between their nodes, or a device, does not work"
        )
        return Finding(
            "transport",
            tuple(waiting[:SUSPECTS]),
            0,
            words,
            waiting[0],
            self._longest(operation),
            self._usual(operation),
        )

    # -- what they have in common ------------------------------------------------------------------

    def _state(self, role: int) -> str:
        return self.flights[role].log.state if role in self.flights else ""

    def _ranked(self, roles: Sequence[int]) -> list[int]:
        """The likeliest first: for whom more wait, who has done nothing for longer."""

        def key(role: int) -> tuple[int, float, int]:
            flight = self.flights.get(role)
            return -len(self.waits.wait_for(role)), -flight.idle if flight else 0.0, role

        return sorted(roles, key=key) if len(roles) <= 64 else sorted(roles)

    def _shared(self, roles: Sequence[int]) -> Operation | None:
        """An operation that all have entered, and in which two of `roles` wait."""
        inside = (each for each in self.waits.stuck if len(self.waits.waiting[each] & set(roles)) > 1)
        return min(inside, key=lambda each: (each.number, each.group), default=None)

    def _longest(self, operation: Operation) -> float:
        return max(self.flights[role].waited(operation) for role in self.waits.waiting[operation])

    def _usual(self, operation: Operation) -> float | None:
        waiting = sorted(self.waits.waiting[operation])[:8]
        known = [self.flights[role].usual(operation, self._unusual) for role in waiting]
        return max((each for each in known if each is not None), default=None)

    def _about(self, kind: str, ranked: Sequence[int], sure: int, how: str = "") -> Finding:
        named = tuple(ranked[:SUSPECTS])
        direct = [operation for role in named for operation in self.waits.for_(role)]
        parts = [how] if how else []
        parts += [self._of_role(role) for role in (named[:sure] if sure else named)]
        if len(ranked) > SUSPECTS:
            parts.append(f"the same is true of {len(ranked) - SUSPECTS} more roles")
        words = "; ".join(parts)
        if not direct:
            return Finding(kind, named, min(sure, SUSPECTS), words)
        operation = max(direct, key=self._longest)
        waiting = self.waits.waiting[operation] - set(named) or self.waits.waiting[operation]
        witness = max(waiting, key=lambda role: self.flights[role].waited(operation))
        return Finding(
            kind,
            named,
            min(sure, SUSPECTS),
            words,
            witness=witness,
            waited=self._longest(operation),
            usual=self._usual(operation),
        )

    def _who(self, role: int) -> str:
        return f"role {role} (node {place(self.places[role])})"

    def _of_role(self, role: int) -> str:
        """What others wait for it in, and what it does instead."""
        operations = self.waits.for_(role)
        does = self._does(role)
        if not operations:
            return f"{self._who(role)}: {does}"
        operation = max(operations, key=self._longest)
        waiting = sorted(self.waits.waiting[operation])
        flight = self.flights.get(role)
        entered = flight is not None and flight.has_entered(operation)
        return (
            f"{self._who(role)} has {'not ended' if entered else 'not entered'} "
            f"{in_words(operation, self.flights[waiting[0]])}, which {roles_in_words(waiting)} "
            f"wait{'s' * (len(waiting) == 1)} in for {self._longest(operation):.1f} s; {does}"
        )

    def _does(self, role: int) -> str:
        flight = self.flights.get(role)
        if flight is None:
            return "its node has not answered"
        if flight.log.at_end:
            return "it has come to the end of its script, or of a part of it"
        if role in self.held_up and flight.log.state != STOPPED:
            return "it waits for other nodes to have copies of its state"
        if (wait := self.excused.get(role)) is not None:
            return f"it waits for {wait.what}: {wait.words}"
        if waits := self.waits.operations(role):
            operation = max(waits, key=flight.waited)
            missing = sorted(self.waits.missing[operation])
            return f"it waits in {in_words(operation, flight)} for {roles_in_words(missing)}"
        state = _STATES.get(flight.log.state, f"its state is {flight.log.state}")
        if (last := flight.last) is None:
            return state
        return f"{state}; the last it began was {in_words(last, flight)}, {flight.waited(last):.1f} s ago"

    def _round(self, roles: frozenset[int]) -> str:
        """A circle, from role to role."""
        at, path = min(roles), []
        while at not in path:
            path.append(at)
            ahead = (r for op in self.waits.operations(at) for r in self.waits.missing[op] if r in roles)
            at = min(ahead)
        path = path[path.index(at) :]
        steps = []
        for one, other in zip(path, [*path[1:], path[0]], strict=True):
            operation = next(op for op in self.waits.operations(one) if other in self.waits.missing[op])
            steps.append(f"role {one} for role {other} in {in_words(operation, self.flights[one])}")
        return f"roles wait for each other in a circle: {', '.join(steps)}"

    def _differ(
        self, operation: Operation, here: Mapping[int, tuple[str, int, str]], ranked: Sequence[int], sure: int
    ) -> Finding:
        groups: dict[tuple[str, int, str], list[int]] = {}
        for role, what in here.items():
            groups.setdefault(what, []).append(role)
        said = [
            f"{roles_in_words(roles)}: {self.flights[roles[0]].records[operation].kind} of {nbytes} bytes"
            + (f" ({dtype})" if dtype else "")
            for (_, nbytes, dtype), roles in sorted(groups.items(), key=lambda each: -len(each[1]))
        ]
        where = (
            f"from role {operation.pair[0]} to role {operation.pair[1]}"
            if operation.pair
            else f"of group {roles_in_words(operation.roles)}"
        )
        words = (
            f"roles do different things as operation #{operation.number} {where}: {'; '.join(said)}: one has "
            "left out an operation, done one twice, or brought another shape"
        )
        if sure:
            words += f"; by its own past, or by the others', that is {roles_in_words(ranked[:sure])}"
        waiting = self.waits.waiting[operation] - set(ranked[:sure]) or self.waits.waiting[operation]
        witness = min(waiting)
        longest = self._longest(operation)
        return Finding(
            "mismatch", tuple(ranked[:SUSPECTS]), min(sure, SUSPECTS), words, witness, longest, proven=True
        )

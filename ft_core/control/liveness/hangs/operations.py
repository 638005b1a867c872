"""What flight records say, put so that roles can be compared: what each has entered, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ft_core.protocol.flight import NEWEST, FlightLog, FlightRecord
from ft_core.protocol.groups import GroupId

STOPPED = "T"
TRACED = "t"
BLOCKED = "D"
_SYMMETRIC = frozenset(
    (
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "gather",
        "scatter",
        "barrier",
        "send",
        "recv",
    )
)
"""Kinds in which all who take part say the same size."""

_MANY = 8
"""Operations of which is known what sizes they have."""

_RUNS = 8
"""The most runs of roles that are named."""

Signature = tuple[str, str, int, str, int]
"""Group, kind, size, type, peer: what makes two operations of a role the same."""


class Alike(NamedTuple):
    """What makes operations of different roles the same: in place of the group its shape, of the peer how far
    it is."""

    shape: tuple[tuple[int, int], ...]
    ordinal: int
    kind: str
    where: int
    grad: bool
    nbytes: int = 0
    dtype: str = ""


class Operation(NamedTuple):
    """An operation that several roles take part in; all of them call it so."""

    group: str
    pair: tuple[int, int] | None
    """The sender (-1: anybody) and receiver of a point-to-point operation."""
    number: int

    @property
    def roles(self) -> tuple[int, ...]:
        """The roles that take part, those that are away included; of a receive from anybody all who may."""
        return members(self.group) if self.pair is None or self.pair[0] < 0 else self.pair


@lru_cache(maxsize=1 << 16)
def members(group: str) -> tuple[int, ...]:
    """The roles of a group, by its name."""
    return tuple(role for run in GroupId.parse(group).runs for role in run)


class Flight:
    """A role's flight record."""

    def __init__(self, log: FlightLog) -> None:
        self.log = log
        self._names = {group.id: group.name for group in log.groups}
        self._backends = {group.name: group.backend for group in log.groups}
        self.labels = {group.name: group.label for group in log.groups}
        self.records: dict[Operation, FlightRecord] = {}
        self.under_way: list[Operation] = []
        """Operations that the role has entered, and that have not ended."""
        self.behind: set[Operation] = set()
        """Operations that its host has issued and its device has not come to: a stream waits for others
        first."""
        self._newest: dict[tuple[str, tuple[int, int] | None], int] = {}
        device = {group.id for group in log.groups if group.backend != "gloo"}
        held = False
        for record in log.records:
            operation = self._operation(record)
            self.records[operation] = record
            series = operation.group, operation.pair
            self._newest[series] = max(self._newest.get(series, -1), record.number)
            if record.under_way:
                (self.behind.add if held and record.group in device else self.under_way.append)(operation)
                held = held or (record.group in device and not record.apart)

    def _operation(self, record: FlightRecord) -> Operation:
        role, pair = self.log.role, None
        if record.kind in ("send", "recv"):
            pair = (role, record.peer) if record.kind == "send" else (record.peer, role)
        return Operation(self._names[record.group], pair, record.number)

    @property
    def waits_for_sure(self) -> bool:
        """Whether it waits in operations that it has not only begun."""
        return any(not self.records[each].apart for each in self.under_way)

    @property
    def waits_in(self) -> list[Operation]:
        """Operations that it does not go on without. Of those that it has only begun: none of gloo's; of a
        device's, which a host may wait for without a word, all where there are no others."""
        waited = [each for each in self.under_way if not self.records[each].apart]
        return waited or [each for each in self.under_way if self._backends[each.group] != "gloo"]

    def has_entered(self, operation: Operation) -> bool:
        """Whether it is in, or was: operations of a series come in their order."""
        return (
            operation not in self.behind
            and self._newest.get((operation.group, operation.pair), -1) >= operation.number
        )

    @property
    def idle(self) -> float:
        """Seconds since it began or ended an operation; 0 if it has never."""
        times = [max(record.started, record.ended) for record in self.log.records]
        return (self.log.now - max(times)) / 1e9 if times else 0.0

    @property
    def last(self) -> Operation | None:
        """The operation that it has begun last."""
        return max(self.records, key=lambda each: self.records[each].started, default=None)

    def waited(self, operation: Operation) -> float:
        """Seconds since it has entered it."""
        return (self.log.now - self.records[operation].started) / 1e9

    def usual(self, operation: Operation, but: Container[Operation] = ()) -> float | None:
        """The longest time that the same took before, as far as the record goes back; None: never seen.
        Those in `but` count only where there are no others."""
        wanted = self._signature(self.records[operation])
        took = {
            each: (record.ended - record.started) / 1e9
            for each, record in self.records.items()
            if not record.under_way and self._signature(record) == wanted
        }
        return max([took[each] for each in took if each not in but] or took.values(), default=None)

    def _signature(self, record: FlightRecord) -> Signature:
        return self._names[record.group], record.kind, record.nbytes, record.dtype, record.peer

    def about(self, operation: Operation) -> tuple[str, int, str]:
        """Kind, size and type, as far as they must be the same on all who take part."""
        kind, nbytes, dtype = self.sized(operation)
        return (kind, nbytes, dtype) if self.records[operation].kind in _SYMMETRIC else (kind, 0, "")

    def sized(self, operation: Operation) -> tuple[str, int, str]:
        """Kind, size and type."""
        record = self.records[operation]
        return "send and recv" if operation.pair else record.kind, record.nbytes, record.dtype

    @property
    def done(self) -> list[tuple[Operation, Alike, int]]:
        """All that it has begun, in that order, from where the record has all groups; and in which step."""
        records = sorted(self.log.records, key=lambda record: record.started)
        counts: dict[int, list[int]] = {}
        for record in records:
            counts.setdefault(record.group, []).append(record.started)
        whole = max((times[0] for times in counts.values() if len(times) >= NEWEST), default=0)
        return [
            (self._operation(record), self._alike(record), record.step)
            for record in records
            if record.started >= whole
        ]

    def _alike(self, record: FlightRecord) -> Alike:
        shape, ordinal = _shape(self._names[record.group])
        where = 0 if record.peer < 0 else record.peer - self.log.role
        size = (record.nbytes, record.dtype) if record.kind in _SYMMETRIC else (0, "")
        return Alike(shape, ordinal, record.kind, where, record.grad, *size)

    def unseen(self, operation: Operation) -> bool:
        """Whether a role brings a size that it has never brought to the same, though those were few."""
        now = self.records[operation]
        sizes = Counter(
            each.nbytes
            for each in self.log.records
            if (each.group, each.kind, each.peer) == (now.group, now.kind, now.peer) and each is not now
        )
        return sizes.total() >= _MANY and 1 not in sizes.values() and now.nbytes not in sizes


@lru_cache(maxsize=1 << 16)
def _shape(group: str) -> tuple[tuple[tuple[int, int], ...], int]:
    """What the groups of other roles have in common with it."""
    identity = GroupId.parse(group)
    return tuple((len(run), run.step) for run in identity.runs), identity.ordinal


def in_words(operation: Operation, flight: Flight) -> str:
    """An operation as a person reads it: `all_reduce #57 of group 0-3`."""
    kind = flight.records[operation].kind if operation in flight.records else "operation"
    if operation.pair is not None:
        source, target = operation.pair
        who = f"role {source}" if source >= 0 else "any role"
        return f"{kind} #{operation.number} from {who} to role {target}"
    label = flight.labels.get(operation.group, "")
    called = f" ({label})" if label else ""
    return f"{kind} #{operation.number} of group {_ranges(members(operation.group))}{called}"


def roles_in_words(roles: Sequence[int]) -> str:
    """`role 3`, `roles 0, 1, 2`, or `roles 0-511`."""
    return f"role{'s' * (len(roles) > 1)} {_ranges(sorted(roles))}"


def _ranges(roles: Sequence[int]) -> str:
    if len(roles) <= 4:
        return ", ".join(map(str, roles)) if len(roles) < 4 or not _consecutive(roles) else _run(roles)
    runs = GroupId.of(roles, 0).runs
    said = [
        f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" + (f" by {run.step}" if run.step > 1 else "")
        for run in runs[:_RUNS]
    ]
    more = sum(map(len, runs[_RUNS:]))
    return ", ".join(said) + (f" and {more} more" if more else "")


def _consecutive(roles: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in pairwise(roles))


def _run(roles: Sequence[int]) -> str:
    return f"{roles[0]}-{roles[-1]}"

"""Reads the flight records of this node's workers, which need not help: they may be stopped, hold the
interpreter's lock, run for ever, or be dead."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from ft_core.comm import flight_memory as flight
from ft_core.comm.flight_memory import DTYPES
from ft_core.node.events import ReadFlight
from ft_core.process import stacks
from ft_core.process.doing import below, look_at
from ft_core.protocol import messages as m
from ft_core.protocol.flight import KINDS, FlightGroup, FlightLog, FlightRecord, Look
from ft_core.state.memory import ControlBlock, Word

_ENDED = "X"
"""State of a process that is no more."""
_TRIES = 5
"""How often what is being written while it is read is read again."""
_SAYS_ENOUGH = ("file", "network", "blocked", "stopped", "ended")
"""What a main thread does that says by itself what it waits for."""
_GROUPS = msgspec.json.Decoder(tuple[FlightGroup, ...])
_WORDS = flight.SLOT.size // 4


@dataclass(frozen=True)
class Recorded:
    """What a worker shares with this node's agent. `pid`: None once it has ended. `given`: the role that it
    was given, and may have yet to take; -1: none. `log_dir`: where it writes its stack, if it is asked to."""

    pid: int | None
    control: ControlBlock
    given: int = -1
    log_dir: Path | None = None

    @property
    def role(self) -> int:
        """The role whose record it is; -1: it has no role."""
        return self.control.flight[: flight.HEADER].cast("q")[flight.ROLE]

    @property
    def epoch(self) -> int:
        """The epoch that its record is of."""
        return self.control.flight[: flight.HEADER].cast("q")[flight.EPOCH]


def answer(
    asked: ReadFlight, there: Sequence[Recorded], fetching: Collection[int]
) -> m.Flights | m.RoleFlight:
    """The flight records of `there`, where the newest of a role stands last. For roles `fetching` their state
    is brought. Takes some milliseconds for each role, and a second at most for one that is looked at closely.

    Who has begun nothing in the epoch that it should be in has an empty record: a standby that was stopped
    before it was given a role, and does not take it, is to be found as well.
    """
    question = asked.question
    if isinstance(question, m.DescribeFlight):
        role = question.role
        found = [each for each in there if each.role == role]
        if not found:
            return m.RoleFlight(role, None)
        log = read(found[-1], role in asked.at_end, role in fetching)
        return m.RoleFlight(role, replace(log, look=look(found[-1].pid, None)))
    by_role: dict[int, tuple[Recorded, bool]] = {}
    for each in there:
        due = each.given, asked.epoch
        behind = min(due) >= 0 and (each.role, each.epoch) != due
        if (role := each.given if behind else each.role) >= 0:
            by_role[role] = each, behind
    logs = (
        _empty(each, asked.epoch, role in fetching)
        if behind
        else read(each, role in asked.at_end, role in fetching, question.newest)
        for role, (each, behind) in by_role.items()
    )
    seen = {
        role: look(each.pid, each.log_dir) for role, (each, _) in by_role.items() if role in question.closely
    }
    return m.Flights(question.number, tuple(replace(log, look=seen.get(log.role)) for log in logs))


def look(pid: int | None, log_dir: Path | None) -> Look | None:
    """What a worker does that writes its stack there. It is asked for that only where the kernel does not say
    what it waits for: a call that a signal interrupts may fail of it."""
    if pid is None:
        return None
    main, stack = look_at(pid), ""
    if log_dir is not None and main.doing not in _SAYS_ENOUGH:
        stack = stacks.own(pid, log_dir)
    return Look(main, tuple(stacks.frames(stack)), tuple(below(pid)))


def _empty(worker: Recorded, epoch: int, fetches: bool) -> FlightLog:
    about = worker.given, epoch, worker.control[Word.VERSION], time.monotonic_ns(), _state(worker.pid)
    return FlightLog(*about, False, (), (), _moved(worker.pid), fetches)


def read(worker: Recorded, at_end: bool, fetches: bool = False, newest: int = flight.SLOTS) -> FlightLog:
    """One that has a role. `newest`: how many ended operations of each group, beside those under way."""
    memory = worker.control.flight
    groups = _groups(memory)
    epoch = worker.epoch
    known = {group.id for group in groups}
    found = [record for record in _records(memory, epoch) if record.group in known]
    ended: Counter[int] = Counter()
    kept = []
    for record in reversed(found):
        if not record.under_way:
            ended[record.group] += 1
        if record.under_way or ended[record.group] <= newest:
            kept.append(record)
    return FlightLog(
        role=worker.role,
        epoch=epoch,
        version=worker.control[Word.VERSION],
        now=time.monotonic_ns(),
        state=_state(worker.pid),
        at_end=at_end,
        groups=groups,
        records=tuple(reversed(kept)),
        moved=_moved(worker.pid),
        fetches=fetches,
    )


def _groups(memory: memoryview) -> tuple[FlightGroup, ...]:
    header = memory[: flight.HEADER].cast("q")
    for _ in range(_TRIES):
        version = header[flight.TABLE]
        start = flight.HEADER + version % 2 * flight.TABLE_BYTES
        table = bytes(memory[start : start + flight.TABLE_BYTES])
        if header[flight.TABLE] != version:
            continue
        end = 8 + int.from_bytes(table[:8], "little")
        try:
            return _GROUPS.decode(table[8:end])
        except ValueError:
            break  # no group was made yet
    return ()


def _records(memory: memoryview, epoch: int) -> Iterator[FlightRecord]:
    """The records in the order in which they began. What is no record is left out."""
    for _, slot in sorted(_slots(memory).items()):
        _, group, of, number, nbytes, started, ended, *more, _ = flight.SLOT.unpack(slot)
        peer, kind, dtype, apart, grad, step = more
        if of != epoch or kind >= len(KINDS) or dtype >= len(DTYPES):
            continue
        values = (
            group,
            number,
            KINDS[kind],
            nbytes,
            DTYPES[dtype],
            peer,
            started,
            ended,
            step,
            bool(apart),
            bool(grad),
        )
        try:
            yield msgspec.convert(values, FlightRecord)
        except msgspec.ValidationError:
            continue


def _slots(memory: memoryview) -> dict[int, bytes]:
    """The whole slots, by their number in the ring."""
    ring = memory[flight.RING : flight.SIZE]
    words = np.frombuffer(ring, np.uint32).reshape(flight.SLOTS, _WORDS)
    found: dict[int, bytes] = {}
    for _ in range(_TRIES):
        # A slot is written from its first word to its last, so it is read the other way.
        last = words[:, -1].copy()
        copy = bytes(ring)
        first = words[:, 0].copy()
        whole = (first == last) & (first % flight.SLOTS == np.arange(flight.SLOTS))
        for at in np.flatnonzero(whole & (first != 0)).tolist():
            found[int(first[at])] = copy[at * flight.SLOT.size : (at + 1) * flight.SLOT.size]
        if bool(whole.all()):
            break
    return found


def _moved(pid: int | None) -> int:
    """Bytes that a process has read and written, and those that it has started: loaders, writers."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended, or this kernel does not say
        return 0
    counts = dict(line.split(": ") for line in lines)
    children = (int(child) for each in listed for child in each.split())
    return int(counts["rchar"]) + int(counts["wchar"]) + sum(map(_moved, children))


def _state(pid: int | None) -> str:
    """The state of the main thread."""
    if pid is None:
        return _ENDED
    try:
        found = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
    except OSError:
        return _ENDED
    return chr(found[found.rindex(b")") + 2])

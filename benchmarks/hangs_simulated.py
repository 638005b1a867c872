"""Roles of a training job as coroutines on a virtual clock, one of which goes wrong: their flight records.

Layouts of TP, PP, DP and EP, with what frameworks do in a step: exchanges in tensor groups, sends and
receives between stages, all-to-alls of experts, reductions of gradients (also behind the backward pass), the
norm over all. Operations meet by group and number, as communicators match them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from ft_core.protocol.flight import NEWEST, FlightGroup, FlightLog, FlightRecord, Kind
from ft_core.protocol.groups import GroupId

KINDS = ("stopped", "spinning", "locked", "loader", "skipped", "doubled", "shape", "order")
STATES = {"stopped": "T", "spinning": "R", "locked": "S", "loader": "S"}
"""Of the kinds in which a role does nothing any more: the state of its main thread."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; `ep` divides `dp`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    layers: int = 2
    microbatches: int = 2
    overlap: bool = False
    """Whether gradients are reduced behind the backward pass."""

    @property
    def roles(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, role: int) -> tuple[int, int, int]:
        """Tensor, pipeline and data rank."""
        return role % self.tp, role // (self.tp * self.dp), role // self.tp % self.dp

    def role(self, t: int, p: int, d: int) -> int:
        return t + self.tp * (d + self.dp * p)


@dataclass(frozen=True)
class Do:
    """An operation. `apart`: it is begun, and waited for later (`Wait`). `peer`: of a point-to-point one."""

    members: tuple[int, ...]
    kind: Kind
    nbytes: int
    peer: int = -1
    apart: bool = False
    ordinal: int = 0


@dataclass(frozen=True)
class Wait:
    """For all that was begun apart."""


@dataclass(frozen=True)
class Compute:
    """Without others."""

    seconds: float


Action = Do | Wait | Compute


def step(layout: Layout, role: int, number: int, eval_every: int = 0) -> Iterator[Action]:
    """What a role does in a step."""
    t, p, d = layout.place(role)
    tensor = tuple(layout.role(x, p, d) for x in range(layout.tp))
    data = tuple(layout.role(t, p, x) for x in range(layout.dp))
    first = d // layout.ep * layout.ep
    expert = tuple(layout.role(t, p, x) for x in range(first, first + layout.ep))
    pipeline = tuple(layout.role(t, x, d) for x in range(layout.pp))
    world = tuple(range(layout.roles))

    def layers(backward: bool) -> Iterator[Action]:
        for layer in range(layout.layers):
            yield Compute(0.01)
            if layout.tp > 1:
                yield Do(tensor, "all_reduce", 4096)
            if layout.ep > 1:
                yield Do(expert, "all_to_all", 2048)
                yield Do(expert, "all_to_all", 2048)
            if backward and layout.overlap and layout.dp > 1 and last:
                yield Do(data, "all_reduce", 1 << 20 | layer, apart=True, ordinal=1)

    last = False
    for _ in range(layout.microbatches):
        if p > 0:
            yield Do(pipeline, "recv", 1024, pipeline[p - 1])
        yield from layers(False)
        if p < layout.pp - 1:
            yield Do(pipeline, "send", 1024, pipeline[p + 1])
    for batch in range(layout.microbatches):
        last = batch == layout.microbatches - 1
        if p < layout.pp - 1:
            yield Do(pipeline, "recv", 1024, pipeline[p + 1])
        yield from layers(True)
        if p > 0:
            yield Do(pipeline, "send", 1024, pipeline[p - 1])
    yield Wait()
    if layout.dp > 1 and not layout.overlap:
        for bucket in range(2):
            yield Do(data, "all_reduce", 1 << 20 | bucket, ordinal=1)
    yield Do(world, "all_reduce", 4)
    yield Compute(0.01)
    if layout.dp > 1:
        yield Do(data, "all_gather", 1 << 20, ordinal=1)
    if eval_every and number % eval_every == eval_every - 1:
        for _ in range(2):
            yield Compute(0.05)
            if layout.tp > 1:
                yield Do(tensor, "all_reduce", 4096)
        yield Do(world, "all_reduce", 8)


@dataclass
class Role:
    """One coroutine, and its record."""

    number: int
    script: Iterator[Action]
    now: float
    counts: dict[tuple[object, ...], int] = field(default_factory=dict)
    records: list[list[float]] = field(default_factory=list)
    """[group, number, nbytes, peer, started, ended], and `kinds` beside."""
    kinds: list[Kind] = field(default_factory=list)
    groups: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    """Records that it waits for."""
    apart: list[int] = field(default_factory=list)
    over: bool = False
    version: int = 0


@dataclass
class Fault:
    """What goes wrong: of which kind, where, and at which operation of which step."""

    kind: str
    role: int
    step: int
    at: int
    done: bool = False


class Fabric:
    """All roles, until nothing moves any more."""

    def __init__(self, layout: Layout, rng: Random, fault: Fault, steps: int) -> None:
        self.layout, self.rng, self.fault, self.steps = layout, rng, fault, steps
        self.now = 0.0
        self._meeting: dict[tuple[object, ...], dict[int, int]] = {}
        self.roles = [Role(number, self._script(number), 1000.0 * number) for number in range(layout.roles)]

    def _script(self, role: int) -> Iterator[Action]:
        for number in range(self.steps):
            actions = list(step(self.layout, role, number, eval_every=5))
            if role == self.fault.role and number == self.fault.step:
                actions = self._spoil(actions)
            yield from actions
            if self.roles[role].over:
                return
            self.roles[role].version += 1

    def _spoil(self, actions: list[Action]) -> list[Action]:
        fault = self.fault
        operations = [at for at, action in enumerate(actions) if isinstance(action, Do)]
        at = operations[fault.at % len(operations)]
        fault.done = True
        action = actions[at]
        assert isinstance(action, Do)
        if fault.kind in STATES:
            inside = fault.kind == "stopped" and self.rng.random() < 0.3
            return [*actions[: at + inside], Compute(float("inf"))]
        if fault.kind == "skipped":
            return [*actions[:at], *actions[at + 1 :]]
        if fault.kind == "doubled":
            return [*actions[: at + 1], *actions[at:]]
        if fault.kind == "shape":
            changed = Do(action.members, action.kind, action.nbytes + 512, action.peer, action.apart,
                         action.ordinal)  # fmt: skip
            return [*actions[:at], changed, *actions[at + 1 :]]
        others = [o for o in operations if o > at and actions[o].members != action.members]  # type: ignore[union-attr]
        if not others:
            fault.done = False
            return actions
        other = others[0]
        return [*actions[:at], actions[other], *actions[at:other], *actions[other + 1 :]]

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Until nothing moves."""
        ready = list(self.roles)
        while ready:
            role = ready.pop(self.rng.randrange(len(ready)))
            for freed in self._advance(role):
                ready.append(freed)

    def _advance(self, role: Role) -> list[Role]:
        freed: list[Role] = []
        for action in role.script:
            if isinstance(action, Compute):
                if action.seconds == float("inf"):
                    role.over = True
                    return freed
                role.now += action.seconds * (0.8 + 0.4 * self.rng.random())
            elif isinstance(action, Wait):
                role.blocked = [at for at in role.apart if not role.records[at][5]]
                role.apart = []
            else:
                freed += self._begin(role, action)
            if role.blocked:
                return freed
        role.over = True
        return freed

    def _begin(self, role: Role, do: Do) -> list[Role]:
        group = (do.members, do.ordinal)
        if group not in role.groups:
            role.groups.append(group)
        pair = (
            None if do.peer < 0 else (role.number, do.peer) if do.kind == "send" else (do.peer, role.number)
        )
        number = role.counts.get((group, pair), 0)
        role.counts[group, pair] = number + 1
        at = len(role.records)
        role.records.append([role.groups.index(group), number, do.nbytes, do.peer, role.now, 0.0])
        role.kinds.append(do.kind)
        (role.apart if do.apart else role.blocked).append(at)
        key = (group, pair, number)
        there = self._meeting.setdefault(key, {})
        there[role.number] = at
        needed = set(pair or do.members)
        if set(there) < needed:
            return []
        what = {
            (self.roles[r].records[a][2], "p2p" if pair else self.roles[r].kinds[a]) for r, a in there.items()
        }
        stopped = self.fault.kind == "stopped" and self.fault.role in needed and self.fault.done
        if len(what) > 1 or (stopped and self._is_stopped_inside(there)):
            return []
        del self._meeting[key]
        end = max(self.roles[r].now - 1000.0 * r for r in needed) + 0.001
        freed = []
        for r, a in there.items():
            other = self.roles[r]
            other.records[a][5] = end + 1000.0 * r
            if a in other.blocked:
                other.blocked.remove(a)
                if not other.blocked:
                    other.now = max(other.now, end + 1000.0 * r)
                    if r != role.number:
                        freed.append(other)
            elif a in other.apart:
                other.apart.remove(a)
        if not role.blocked:
            role.now = max(role.now, end + 1000.0 * role.number)
        return freed

    def _is_stopped_inside(self, there: dict[int, int]) -> bool:
        """Whether the one that is stopped has come in and does not get on."""
        role = self.roles[self.fault.role]
        return role.over and there[role.number] == len(role.records) - 1

    # -- what is left ------------------------------------------------------------------------------

    @property
    def hangs(self) -> bool:
        return any(role.blocked for role in self.roles)

    def logs(self, hung_for: float) -> list[FlightLog]:
        """Read so long after nothing moved any more, each in its own time."""
        end = max(role.now - 1000.0 * role.number for role in self.roles) + hung_for
        return [self._log(role, end + 1000.0 * role.number) for role in self.roles]

    def _log(self, role: Role, now: float) -> FlightLog:
        rows = [
            FlightRecord(int(r[0]), int(r[1]), kind, int(r[2]), "float32", int(r[3]), int((r[4] + 1) * 1e9),
                         int((r[5] + 1) * 1e9) if r[5] else 0)
            for r, kind in zip(role.records, role.kinds, strict=True)
        ]  # fmt: skip
        kept: list[FlightRecord] = []
        counts: dict[int, int] = {}
        for record in reversed(rows):
            counts[record.group] = counts.get(record.group, 0) + (not record.under_way)
            if record.under_way or counts[record.group] <= NEWEST:
                kept.append(record)
        wrong = role.number == self.fault.role and self.fault.done
        state = STATES.get(self.fault.kind, "S") if wrong else "S"
        groups = tuple(
            FlightGroup(number, str(GroupId.of(members, ordinal)))
            for number, (members, ordinal) in enumerate(role.groups)
        )
        return FlightLog(
            role=role.number,
            epoch=1,
            version=role.version,
            now=int((now + 1) * 1e9),
            state=state,
            at_end=False,
            groups=groups,
            records=tuple(reversed(kept)),
        )


LAYOUTS = (
    *(Layout(dp=n, overlap=o) for n in (2, 4) for o in (False, True)),
    *(Layout(tp=2, dp=n, overlap=o) for n in (1, 2, 4) for o in (False, True)),
    *(Layout(pp=n, dp=d, microbatches=4) for n in (2, 4) for d in (1, 2)),
    *(Layout(tp=2, pp=2, dp=d, overlap=o) for d in (1, 2) for o in (False, True)),
    *(Layout(dp=4, ep=n) for n in (2, 4)),
    Layout(tp=2, dp=4, ep=2, overlap=True),
    Layout(tp=4, pp=2, dp=4, ep=2, layers=4),
    Layout(tp=8, pp=2, dp=4, layers=2),
)


def hang(seed: int) -> tuple[Layout, Fault, list[FlightLog]] | None:
    """A drawn one; None where nothing hangs of it (an operation that was done twice in silence)."""
    rng = Random(seed)
    layout = rng.choice(LAYOUTS)
    fault = Fault(
        rng.choice(KINDS), rng.randrange(layout.roles), rng.randrange(3, 10), rng.randrange(1 << 16)
    )
    fabric = Fabric(layout, rng, fault, steps=fault.step + 3)
    fabric.run()
    if not fabric.hangs or not fault.done:
        return None
    return layout, fault, fabric.logs(hung_for=12.0)

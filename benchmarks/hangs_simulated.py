"""Roles of a training job as coroutines on a virtual clock, one of which goes wrong: their flight records.

Layouts of TP, PP, DP and EP, with what frameworks do in a step: exchanges in tensor groups, sends and
receives between stages, all-to-alls of experts, reductions of gradients (also behind the backward pass), the
norm over all. Operations meet by group and number, as communicators match them. Where a device does them
(`Layout.device`, as with NCCL), the host only issues them and runs ahead; the device does one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
    device: bool = False
    """Whether the host waits for none but the norm."""
    ragged: bool = False
    """Whether experts get another number of tokens in each exchange."""

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
    wrong: bool = False
    """Of a size that does not fit the others', which ends it for nobody."""
    grad: bool = False
    """In the forward pass of training."""


@dataclass(frozen=True)
class Wait:
    """For all that was begun apart; `host`: the host, for all that it has issued."""

    host: bool = False


@dataclass(frozen=True)
class Compute:
    """Without others."""

    seconds: float


Action = Do | Wait | Compute
Meeting = tuple[tuple[tuple[int, ...], int], tuple[int, int] | None, int]
"""Members and ordinal of the group, sender and receiver, number."""


def step(layout: Layout, role: int, number: int, eval_every: int = 0) -> Iterator[Action]:
    """What a role does in a step."""
    t, p, d = layout.place(role)
    tensor = tuple(layout.role(x, p, d) for x in range(layout.tp))
    data = tuple(layout.role(t, p, x) for x in range(layout.dp))
    first = d // layout.ep * layout.ep
    expert = tuple(layout.role(t, p, x) for x in range(first, first + layout.ep))
    pipeline = tuple(layout.role(t, x, d) for x in range(layout.pp))
    world = tuple(range(layout.roles))

    def layers(batch: int, backward: bool) -> Iterator[Action]:
        for layer in range(layout.layers):
            yield Compute(0.01)
            if layout.tp > 1:
                yield Do(tensor, "all_reduce", 4096, grad=not backward)
            if layout.ep > 1:
                tokens = 64 * ((7 * number + 3 * layer + 5 * role + batch) % 11) if layout.ragged else 0
                yield Do(expert, "all_to_all", 2048 + tokens, grad=not backward)
                yield Do(expert, "all_to_all", 2048 + tokens, grad=not backward)
            if backward and layout.overlap and layout.dp > 1 and last:
                yield Do(data, "all_reduce", 1 << 20 | layer, apart=True, ordinal=1)

    last = False
    for batch in range(layout.microbatches):
        if p > 0:
            yield Do(pipeline, "recv", 1024, pipeline[p - 1], grad=True)
        yield from layers(batch, False)
        if p < layout.pp - 1:
            yield Do(pipeline, "send", 1024, pipeline[p + 1], grad=True)
    for batch in range(layout.microbatches):
        last = batch == layout.microbatches - 1
        if p < layout.pp - 1:
            yield Do(pipeline, "recv", 1024, pipeline[p + 1])
        yield from layers(batch, True)
        if p > 0:
            yield Do(pipeline, "send", 1024, pipeline[p - 1])
    yield Wait()
    if layout.dp > 1 and not layout.overlap:
        for bucket in range(2):
            yield Do(data, "all_reduce", 1 << 20 | bucket, ordinal=1)
    yield Do(world, "all_reduce", 4)
    yield Wait(host=True)
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
    """[group, number, nbytes, peer, started, ended, step], and what was to be done beside."""
    did: list[Do] = field(default_factory=list)
    groups: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    """Records that it waits for."""
    apart: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    """Records that its device has not done."""
    entered: set[int] = field(default_factory=set)
    """Those that it has come to."""
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


def spoil(actions: list[Action], fault: Fault, inside: bool) -> list[Action]:
    """The actions of the step in which it happens. `inside`: a role stops in the operation, not before it."""
    operations = [at for at, action in enumerate(actions) if isinstance(action, Do)]
    at = operations[fault.at % len(operations)]
    fault.done = True
    action = actions[at]
    assert isinstance(action, Do)
    if fault.kind in STATES:
        return [*actions[: at + inside], Compute(float("inf"))]
    if fault.kind == "skipped":
        return [*actions[:at], *actions[at + 1 :]]
    if fault.kind == "doubled":
        return [*actions[: at + 1], *actions[at:]]
    if fault.kind == "shape":
        changed = replace(action, nbytes=action.nbytes + 512, wrong=True)
        return [*actions[:at], changed, *actions[at + 1 :]]
    others = [o for o in operations if o > at and actions[o].members != action.members]  # type: ignore[union-attr]
    if not others:
        fault.done = False
        return actions
    other = others[0]
    return [*actions[:at], actions[other], *actions[at:other], *actions[other + 1 :]]


class Fabric:
    """All roles, until nothing moves any more."""

    def __init__(self, layout: Layout, rng: Random, fault: Fault, steps: int) -> None:
        self.layout, self.rng, self.fault, self.steps = layout, rng, fault, steps
        self.now = 0.0
        self._meeting: dict[Meeting, dict[int, int]] = {}
        self.roles = [Role(number, self._script(number), 1000.0 * number) for number in range(layout.roles)]

    def _script(self, role: int) -> Iterator[Action]:
        for number in range(self.steps):
            actions = list(step(self.layout, role, number, eval_every=5))
            if role == self.fault.role and number == self.fault.step:
                inside = self.fault.kind == "stopped" and self.rng.random() < 0.3
                actions = spoil(actions, self.fault, inside)
            yield from actions
            if self.roles[role].over:
                return
            self.roles[role].version += 1

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
                host = action.host and self.layout.device
                role.blocked = [at for at in (role.queue if host else role.apart) if not role.records[at][5]]
                role.apart = []
                if self.layout.device and not host:
                    role.blocked = []  # a stream waits
                    freed += self._go_on(role)
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
        about = role.groups.index(group), number, do.nbytes, do.peer, role.now, 0.0, role.version
        role.records.append(list(about))
        role.did.append(do)
        if do.apart:
            role.apart.append(at)
        elif not self.layout.device:
            role.blocked.append(at)
        if not self.layout.device:
            return self._enter(role, at)
        role.queue.append(at)
        return self._go_on(role)

    def _go_on(self, role: Role) -> list[Role]:
        """The device of a role does what it can: no operation before those that its stream waits for."""
        freed: list[Role] = []
        for at in list(role.queue):
            if at not in role.queue:
                continue
            if at not in role.entered:
                role.entered.add(at)
                freed += self._enter(role, at)
            if at in role.queue and at not in role.apart:
                break
        return [each for each in freed if each is not role]

    def _enter(self, role: Role, at: int) -> list[Role]:
        """Its device has come to it. Returns the others of which the host goes on."""
        do = role.did[at]
        pair = (
            None if do.peer < 0 else (role.number, do.peer) if do.kind == "send" else (do.peer, role.number)
        )
        key = ((do.members, do.ordinal), pair, int(role.records[at][1]))
        there = self._meeting.setdefault(key, {})
        there[role.number] = at
        needed = set(pair or do.members)
        if set(there) < needed:
            return []
        doing = [self.roles[r].did[a] for r, a in there.items()]
        sizes = {0 if each.kind == "all_to_all" else each.nbytes for each in doing}
        kinds = {"p2p" if pair else each.kind for each in doing}
        stopped = self.fault.kind == "stopped" and self.fault.role in needed and self.fault.done
        if len(sizes) > 1 or len(kinds) > 1 or any(each.wrong for each in doing):
            return []
        if stopped and self._is_stopped_inside(there):
            return []
        del self._meeting[key]
        end = max(self.roles[r].now - 1000.0 * r for r in needed) + 0.001
        freed: list[Role] = []
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
        for r, a in there.items():
            other = self.roles[r]
            if a in other.queue:
                other.queue.remove(a)
        for r in there:
            if self.roles[r].queue:
                freed += [each for each in self._go_on(self.roles[r]) if each is not role]
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
            FlightRecord(int(r[0]), int(r[1]), do.kind, int(r[2]), "float32", int(r[3]),
                         _time(r[4]), _time(r[5]), int(r[6]), at in role.apart, do.grad)
            for at, (r, do) in enumerate(zip(role.records, role.did, strict=True))
        ]  # fmt: skip
        kept: list[FlightRecord] = []
        counts: dict[int, int] = {}
        for record in reversed(rows):
            counts[record.group] = counts.get(record.group, 0) + (not record.under_way)
            if record.under_way or counts[record.group] <= NEWEST:
                kept.append(record)
        wrong = role.number == self.fault.role and self.fault.done
        usual = "R" if self.layout.device else "S"  # who waits for a device looks again and again
        state = STATES.get(self.fault.kind, usual) if wrong else usual
        groups = tuple(
            FlightGroup(
                number, str(GroupId.of(members, ordinal)), "", "nccl" if self.layout.device else "gloo"
            )
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


def _time(seconds: float) -> int:
    """As it is recorded; 0 stays what it is."""
    return int((seconds + 1) * 1e9) if seconds else 0


LAYOUTS = (
    *(Layout(dp=n, overlap=o) for n in (2, 4) for o in (False, True)),
    *(Layout(tp=2, dp=n, overlap=o) for n in (1, 2, 4) for o in (False, True)),
    *(Layout(pp=n, dp=d, microbatches=4) for n in (2, 4) for d in (1, 2)),
    *(Layout(tp=2, pp=2, dp=d, overlap=o) for d in (1, 2) for o in (False, True)),
    *(Layout(dp=4, ep=n) for n in (2, 4)),
    Layout(tp=2, dp=4, ep=2, overlap=True),
    Layout(tp=4, pp=2, dp=4, ep=2, layers=4),
    Layout(tp=8, pp=2, dp=4, layers=2),
    Layout(dp=4, ep=4, ragged=True),
    *(Layout(dp=n, device=True, overlap=o) for n in (2, 4) for o in (False, True)),
    *(Layout(tp=2, pp=2, dp=2, device=True, overlap=o) for o in (False, True)),
    Layout(tp=2, dp=4, ep=2, device=True, ragged=True),
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

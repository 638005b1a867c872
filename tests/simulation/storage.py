"""Storage that all nodes share, and what agents do with it (`ft_core.state.durable`): contents for files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ft_core.node import events as ev
from ft_core.protocol.messages import NodePlan
from ft_core.state import durable

from .invariants import Invariant
from .training import Content

if TYPE_CHECKING:
    from .job import SimJob
    from .node import SimNode

Answered = Callable[[str], None]
"""Called with what is wrong, if anything is."""
_UNREACHABLE = "it does not answer"


class Storage:
    """The durable directory. A checkpoint is complete once it has the parts of all roles."""

    def __init__(self, job: SimJob) -> None:
        self.job = job
        self.parts: dict[str, dict[int, Content]] = {}
        """By name, then role."""
        self.slow = 1.0
        """How many times longer everything takes."""
        self.hangs: set[str] = set()
        """Machines whose calls do not come back for as long."""
        self.unreachable: set[str] = set()
        """Machines whose calls fail."""
        self.unmounted: set[str] = set()
        """Machines that see an empty directory of their own in its place."""
        self.seen: dict[str, bool] = {}
        """Machines that have looked for checkpoints: whether the directory was there when they did last."""
        self.full = False
        self.was_in_trouble = False
        """Whether any node could ever not read it."""
        self.ever_ailed = False
        """Whether any call was slow, or failed."""
        self.damaged: set[tuple[str, int]] = set()
        """Parts that are not what was written."""

    def healed(self) -> None:
        """It is as fast, large and reachable as it should be."""
        self.slow, self.full = 1.0, False
        self.hangs.clear()
        self.unreachable.clear()
        self.unmounted.clear()

    def complete(self) -> list[str]:
        """Names, oldest first."""
        return sorted(n for n, parts in self.parts.items() if len(parts) == self.job.training.roles)

    @property
    def is_nowhere(self) -> bool:
        """Whether nobody who has looked can know of it."""
        return bool(self.seen) and not any(self.seen.values())

    def newest(self, given_up: Callable[[str], bool]) -> str:
        """Of the complete ones, but for those that the job has given up, if there is one."""
        return max((name for name in self.complete() if not given_up(name)), default="")

    def content(self, name: str) -> Content:
        """Of a complete one: the same of all roles."""
        found = set(self.parts[name].values())
        if len(found) != 1:
            raise Invariant.DURABLE.broken(f"the parts of {name} are of {len(found)} pasts")
        return found.pop()

    # -- what agents do ----------------------------------------------------------------------------

    def save(self, node: SimNode, order: ev.WriteDurable, ends: Callable[[ev.DurableDone], None]) -> None:
        """As `durable.save`, in a thread of the agent."""
        name = durable.name_of(order.version, order.plan)

        def fail(why: str) -> None:
            def removed(problem: str) -> None:
                if not problem:
                    self.parts.pop(name, None)
                    self._prune(name, order.plan, failed=True)
                ends(ev.DurableDone(order.role, order.plan.epoch, order.version, (), why))

            self._call(node, removed)

        def copy() -> None:
            found = self._parts(node, order)
            if order.role not in found:
                fail(f"step {order.version} is no longer in memory: training or a recovery was quicker")
            else:
                self._call(node, lambda problem: begin(problem, found))

        def begin(problem: str, found: dict[int, Content]) -> None:
            if problem:
                fail(problem)
                return
            if order.role == min(order.plan.roles):
                self._prune(name, order.plan)
            write(list(found.items()), tuple(found))

        def write(left: list[tuple[int, Content]], roles: tuple[int, ...]) -> None:
            if not left:
                ends(ev.DurableDone(order.role, order.plan.epoch, order.version, roles))
                return
            (role, content), rest = left[0], left[1:]

            def written(problem: str) -> None:
                if problem or self.full:
                    fail(problem or "No space left on device")
                    return
                if node.machine_name not in self.unmounted:
                    self.parts.setdefault(name, {})[role] = content
                if name in self.complete():
                    self.content(name)
                write(rest, roles)

            self._call(node, written)

        node.later(0.01 * node.world.rng.random(), copy)

    def list(self, node: SimNode, number: int) -> None:
        """Which can be read on this node."""

        def listed(problem: str) -> None:
            elsewhere = node.machine_name in self.unmounted
            self.was_in_trouble |= elsewhere
            self.seen[node.machine_name] = not elsewhere
            names = () if problem or elsewhere else tuple(self.complete())
            node.handle(ev.DurableListed(number, names, problem))

        self._call(node, listed)

    def read(self, node: SimNode, name: str, role: int, read: Callable[[Content | None, str], None]) -> None:
        """`read(content, problem)`. A part that is not there makes the checkpoint incomplete for good."""

        def answered(problem: str) -> None:
            found = None if problem else self.parts.get(name, {}).get(role)
            if node.machine_name in self.unmounted:
                found = None
            elif (name, role) in self.damaged:
                self.parts.get(name, {}).pop(role, None)  # set aside
                found = None
            read(found, problem or ("" if found is not None else f"{name}, role {role}: it is damaged"))

        self._call(node, answered)

    def _call(self, node: SimNode, answered: Answered) -> None:
        """One call to the file system, from a thread of a node."""
        where = node.machine_name

        self.ever_ailed |= self.full or self.slow > 1
        self.ever_ailed |= bool(self.hangs or self.unreachable or self.unmounted)

        def answer() -> None:
            self.ever_ailed |= self.full or where in self.hangs | self.unreachable
            if where in self.hangs:
                node.later(0.5, answer)
            else:
                self.was_in_trouble |= where in self.unreachable
                answered(_UNREACHABLE if where in self.unreachable else "")

        node.later(0.05 * node.world.rng.random() * self.slow, answer)

    def _prune(self, name: str, plan: NodePlan, *, failed: bool = False) -> None:
        for each in durable.superfluous(sorted(self.parts), self.complete(), name, plan.past, failed=failed):
            del self.parts[each]

    def _parts(self, node: SimNode, order: ev.WriteDurable) -> dict[int, Content]:
        """As `durable.parts`: of the role itself, and of those that are away and have it as counterpart."""
        if (own := node.store.find(order.role, order.version)) is None:
            return {}
        found = {order.role: own}
        plan = order.plan
        for away in (away for away, counterpart in plan.absent.items() if counterpart == order.role):
            theirs: Content | None = own
            if not order.replicated and away in plan.adopted:
                theirs = node.store.find(away, order.version, adopted=True)
            elif not order.replicated and plan.away.get(away):
                theirs = None
            if theirs is not None:
                found[away] = theirs
        return found


def preloaded(job: SimJob, version: int, content: Content) -> None:
    """A former job has left a checkpoint."""
    name = f"step-{version:08d}-{3:05d}-former-{job.training.roles}"
    job.storage.parts[name] = dict.fromkeys(range(job.training.roles), content)

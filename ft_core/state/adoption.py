"""The snapshots that one worker makes: of its own role, and of those that it has adopted.

Where one optimizer is sharded over all replica groups, a role that leaves takes a shard away that nobody
else has in use. Its counterpart in another group adopts it: restores it from the ring replicas, steps it
beside its own, and snapshots it under the name of the role that is away, which therefore finds it when it
comes back. So nothing is laid out anew, whoever leaves or returns (see docs/elastic.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from ft_core.adapter import Adapter
from ft_core.protocol.messages import CopyHere
from ft_core.state.manifest import Segment
from ft_core.state.snapshot import Snapshotter

S = TypeVar("S")
Allocate = Callable[[int, int, list[Segment]], Sequence[int]]
"""(role, slot, segments) -> address of fresh memory for that slot, owned by the agent."""


class AdoptedStates(Generic[S]):
    """What one worker holds of roles that are away, as a framework's adapter has it."""

    def __init__(self, make: Callable[[int], S]) -> None:
        """`make`: what a role had alone, with content that is yet to be restored."""
        self._make = make
        self._of: dict[int, S] = {}

    def adopt(self, roles: Iterable[int]) -> dict[int, S]:
        """Hold that of these roles, and of no others; what is held already stays. By role."""
        self._of = {role: self._of[role] if role in self._of else self._make(role) for role in roles}
        return dict(self._of)

    def items(self) -> Iterable[tuple[int, S]]:
        """By role, in the order of adoption."""
        return self._of.items()

    def __iter__(self) -> Iterator[S]:
        return iter(self._of.values())

    def __bool__(self) -> bool:
        return bool(self._of)

    def __getitem__(self, role: int) -> S:
        return self._of[role]


class Snapshots:
    """Stages, and loads, all that one worker holds."""

    def __init__(
        self,
        role: int,
        adapter: Adapter,
        allocate: Allocate,
        on_staged: Callable[[int, int], None],
        on_copy: Callable[[], None],
        epoch_is_over: Callable[[], bool],
        verify: bool = False,
    ) -> None:
        """`on_staged(role, version)` and `epoch_is_over` (see `Snapshotter`) are called from a thread.
        `verify`: of the role itself."""
        self._role, self._adapter, self._epoch_is_over = role, adapter, epoch_is_over
        self._allocate, self._on_staged = allocate, on_staged
        self._maker = getattr(adapter, "maker", None)  # a class that does not name `Adapter` may have none
        about = on_copy, epoch_is_over, self._maker
        own = Snapshotter(adapter, partial(allocate, role), partial(on_staged, role), *about, verify)
        self._own = own
        self._of: dict[int, tuple[Any, Snapshotter]] = {role: (adapter, own)}

    def adopt(self, roles: Iterable[int]) -> frozenset[int]:
        """From now on hold what these roles had alone, and no others. Returns all roles of which this has
        something: where every group has all the state, nothing is adopted."""
        states = self._adapter.adopt(sorted(roles))
        kept = {self._role: self._of[self._role]}
        for role, state in states.items():
            before = self._of.get(role)
            if before is not None and before[0] is state:
                kept[role] = before
            else:
                staged = partial(self._on_staged, role)
                allocate = partial(self._allocate, role)
                kept[role] = (
                    state,
                    Snapshotter(
                        state, allocate, staged, epoch_is_over=self._epoch_is_over, maker=self._maker
                    ),
                )
        self._of = kept
        return frozenset(kept)

    @property
    def sums(self) -> dict[str, str]:
        """The checksums of the role's newest version; see `Snapshotter.sums`."""
        return self._own.sums

    def note(self, version: int) -> None:
        """Everything is `version`; see `Snapshotter.note`."""
        for _, snapshotter in self._of.values():
            snapshotter.note(version)

    def stage(self, version: int) -> None:
        """Begin to copy everything as `version`; see `Snapshotter.stage`."""
        for _, snapshotter in self._of.values():
            snapshotter.stage(version)

    def step_begins(self) -> None:
        """The optimizer is about to change everything."""
        for _, snapshotter in self._of.values():
            snapshotter.step_begins()

    def load(self, part: CopyHere, version: int) -> None:
        """Put `version` of one role back into the framework; see `Snapshotter.load`."""
        segments = [Segment.of(layout) for layout in part.segments]
        _, snapshotter = self._of[part.role]
        snapshotter.load(part.slot, part.address, segments, version)

    def wait(self) -> None:
        """Until what was begun is complete in host memory, or has failed. Raises what a copy raised."""
        with contextlib.ExitStack() as all_of_them:
            for _, snapshotter in self._of.values():
                all_of_them.callback(snapshotter.wait)

    @property
    def under_way(self) -> bool:
        """Whether a copy is being made."""
        return any(snapshotter.under_way for _, snapshotter in self._of.values())

    def ended(self) -> None:
        """Return once none is, well or not; see `Snapshotter.ended`."""
        for _, snapshotter in self._of.values():
            snapshotter.ended()

    @property
    def failed(self) -> BaseException | None:
        """What stopped a copy under way, if anything did."""
        return next((error for _, s in self._of.values() if (error := s.failed) is not None), None)

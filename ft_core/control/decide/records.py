"""Which start-up operations the roles have on record, added up as they say it: what of them is done, and who
has to ask whom.

Of a hundred thousand roles all but a few have everything. So it is counted how many have each operation, and
only where some have not it is looked for who.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from ft_core.protocol.groups import GroupId, Series, parse, series_of
from ft_core.protocol.messages import Counts, NodeName, Role

Operations = dict[str, tuple[int, int]]
"""Start-up operations by name: how often each is done, and a role that has its record."""


class Records:
    """What the live workers of all roles have on record."""

    def __init__(self) -> None:
        self._of: dict[Role, Counts] = {}
        self._having: dict[str, dict[int, int]] = {}
        """Operation -> how many roles have it so many times."""
        self._done: Operations = {}
        """How often all have done each operation that is not among the `_changed`."""
        self._lacking: set[str] = set()
        """Operations in `_done` that some role of their group has not done, or not as often."""
        self._names: dict[GroupId, set[str]] = {}
        """The names of each group's operations."""
        self._changed: set[str] = set()

    @property
    def roles(self) -> Set[Role]:
        """Roles that have something on record."""
        return self._of.keys()

    def say(self, role: Role, counts: Counts) -> None:
        """Set what a role has on record; nothing, if it has no worker."""
        before = self._of.get(role, {})
        if before == counts:
            return
        for name, count in before.items():
            if count:
                having = self._having[name]
                having[count] -= 1
                if not having[count]:
                    del having[count]
        for name, count in counts.items():
            if count:
                having = self._having.setdefault(name, {})
                having[count] = having.get(count, 0) + 1
        self._changed.update(before, counts)
        if counts:
            self._of[role] = counts
        else:
            del self._of[role]

    def done(self) -> Operations:
        """What is done of each operation. Not to be changed; the next word of a role may change it."""
        self.prepare(len(self._changed))
        return self._done

    def prepare(self, most: int) -> None:
        """Look at so many operations of which there is news: what is done now nobody waits for later."""
        for _ in range(min(most, len(self._changed))):
            self._look_at(self._changed.pop())

    def _look_at(self, name: str) -> None:
        which = _series(name)
        if not (having := self._having.get(name)):
            self._having.pop(name, None)
            self._done.pop(name, None)
            self._lacking.discard(name)
            if (names := self._names.get(which.group)) is not None:
                names.discard(name)
                if not names:
                    del self._names[which.group]
            return
        most = max(having)
        holder = (role for role in _members(which) if self._has(role, name) == most)
        self._done[name] = most, next(holder)
        self._names.setdefault(which.group, set()).add(name)
        if having[most] < _size(which):
            self._lacking.add(name)
        else:
            self._lacking.discard(name)

    def _has(self, role: Role, name: str) -> int:
        counts = self._of.get(role)
        return counts.get(name, 0) if counts is not None else 0

    def needed(self, places: Mapping[Role, NodeName], without: Set[Role]) -> dict[NodeName, Operations]:
        """Node -> the operations in whose groups one of its roles has not all on record: nobody else asks for
        them. `without`: roles of the job that have nothing on record."""
        done = self.done()
        needed: dict[NodeName, Operations] = {}
        for group in dict.fromkeys(_series(name).group for name in sorted(self._lacking)):
            names = sorted(self._names[group])
            for role in sorted(self._short(group, names, without)):
                if role in places:
                    mine = (name for name in names if (pair := _series(name).pair) is None or role in pair)
                    needed.setdefault(places[role], {}).update((name, done[name]) for name in mine)
        return needed

    def of_groups_with(self, role: Role) -> Operations:
        """What is done of all operations that this role takes part in."""
        return {name: found for name, found in self.done().items() if _series(name).needs(role)}

    def _short(self, group: GroupId, names: Iterable[str], without: Set[Role]) -> set[Role]:
        """The roles of a group that have not all of it."""
        found: set[Role] = set()
        if len(without) < sum(map(len, group.runs)):
            bare = {role for role in without if role in group}
        else:
            bare = {role for run in group.runs for role in run if role in without}
        for name in names:
            if name not in self._lacking:
                continue
            which, (most, _) = _series(name), self._done[name]
            if which.pair is None and self._having[name][most] + len(bare) == _size(which):
                found |= bare  # so all others have it
            else:
                found.update(role for role in _members(which) if self._has(role, name) < most)
        return found


def completed(counts: Iterable[tuple[Role, Counts]]) -> Records:
    """The records of roles that have said what they have."""
    records = Records()
    for role, known in counts:
        records.say(role, known)
    return records


def _series(name: str) -> Series:
    return series_of(parse(name))


def _members(which: Series) -> Iterable[Role]:
    return which.pair if which.pair is not None else (role for run in which.group.runs for role in run)


def _size(which: Series) -> int:
    return 2 if which.pair is not None else sum(map(len, which.group.runs))

"""What nodes hold, as a decision reads it: their reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal, Protocol


class RoleHoldings(Protocol):
    """What an agent says about a role that is, or was, played on its node, once its worker is quiet or
    dead."""

    @property
    def alive(self) -> bool:
        """Whether its worker lives."""

    @property
    def stage(self) -> Literal["startup", "training"]:
        """The stage of its worker: "startup" until the first train step in this job."""

    @property
    def versions(self) -> Sequence[int]:
        """The complete local snapshots in the agent's memory: they outlive the worker."""

    @property
    def segments(self) -> Sequence[str]:
        """The segments that each of these snapshots consists of."""


@dataclass
class NodeReport:
    """What a live agent holds.

    `replicas` maps a segment's id to the verified versions kept for other nodes. `segments` maps the id of
    every segment the agent knows of, its own or not, to the segment's holders.
    """

    node: str
    domain: str
    roles: Mapping[int, RoleHoldings] = field(default_factory=dict)
    replicas: Mapping[str, Sequence[int]] = field(default_factory=dict)
    segments: Mapping[str, Sequence[int]] = field(default_factory=dict)
    at: Sequence[Sequence[int]] | None = None
    """Versions of the roles, where `roles` does not say them: one list for all of them, or one for each, in
    order."""
    copies_at: Sequence[Sequence[int]] | None = None
    """Versions of `replicas`, where they do not say them: one list for all, or one for each, in order."""
    ids: frozenset[str] | None = None
    """All segments of its roles, if that is known, and each has some."""
    home: bool = False
    """Whether it is known that its roles are those that were placed there when the failure came."""

    def each_role(self) -> Iterator[tuple[int, RoleHoldings, Sequence[int]]]:
        """Each role, what is said of it, and its versions."""
        if self.at is None:
            return ((role, own, own.versions) for role, own in self.roles.items())
        return ((role, own, at) for (role, own), at in zip(self.roles.items(), self._each(self.at)))  # noqa: B905

    def each_copy(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Segments kept for others, with their versions."""
        if self.copies_at is None:
            return iter(self.replicas.items())
        return zip(self.replicas, self._each(self.copies_at))  # noqa: B905

    def has_all(self, version: int | None) -> bool:
        """Whether all of its roles are known to have that version, and what it consists of."""
        if self.ids is None or self.at is None:
            return False
        return all_have(self.at, version)

    @staticmethod
    def _each(at: Sequence[Sequence[int]]) -> Iterable[Sequence[int]]:
        return repeat(at[0]) if len(at) == 1 else at


def all_have(at: Sequence[Sequence[int]] | None, version: int | None) -> bool:
    """Whether a version is among those of all of these. `at`: once for all the same, or of each."""
    if at is None or len(at) == 1:
        return at is not None and version in at[0]
    return all(version in versions for versions in at)

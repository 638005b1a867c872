"""What the controller must know of a node's roles, as it was said."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ft_core.protocol import messages as m

OfRole = (
    m.WorkerLost | m.NoIdleWorker | m.RestoreFailed | m.Restored | m.Stepped | m.Reopened | m.RoleLayout
    | m.Prepared | m.Held | m.Unprotected | m.Suspect | m.Completed | m.Finished
)  # fmt: skip


class Said:
    """It may not have been heard: the connection breaks, a controller is restarted. So all of it is repeated
    with each greeting, which does no harm. Of each kind the newest counts; a role's next worker begins anew.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[type[OfRole], int, bool], OfRole] = {}

    def keep(self, message: OfRole) -> None:
        """It is about `message.role`."""
        adopted = isinstance(message, m.RoleLayout) and message.adopted
        self._messages[type(message), message.role, adopted] = message

    def forget(self, roles: Collection[int]) -> None:
        """They have other workers from now on, or are elsewhere."""
        self._messages = {key: kept for key, kept in self._messages.items() if key[1] not in roles}

    def keep_only(self, roles: Collection[int]) -> None:
        """All others are elsewhere."""
        self._messages = {key: kept for key, kept in self._messages.items() if key[1] in roles}

    def prepared(self, role: int) -> m.Prepared | None:
        """Whether, and how, a role has said that it waits for its state."""
        found = self._messages.get((m.Prepared, role, False))
        return found if isinstance(found, m.Prepared) else None

    def __iter__(self) -> Iterator[OfRole]:
        return iter(self._messages.values())

"""What the controller must know of a node's roles, as it was said."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from ft_core.protocol import messages as m


class PendingReports:
    """Reports that may not have been heard, since the connection breaks or a controller is restarted. All of
    them are repeated with each greeting, which does no harm. Of each kind the newest counts; a role's next
    worker begins anew."""

    def __init__(self) -> None:
        self._messages: dict[tuple[type[m.OfRole], int, bool], tuple[m.OfRole, float]] = {}
        """The messages, each with when it was said first."""

    def keep(self, message: m.OfRole, now: float) -> None:
        """Keep a message about `message.role`, in place of an older one of its kind."""
        adopted = isinstance(message, m.RoleLayout) and message.adopted
        self._messages[type(message), message.role, adopted] = message, now

    def forget(self, roles: Collection[int]) -> None:
        """Forget what was said of roles that have other workers from now on, or are elsewhere."""
        self._messages = {key: kept for key, kept in self._messages.items() if key[1] not in roles}

    def keep_only(self, roles: Collection[int]) -> None:
        """Forget what was said of other roles, which are elsewhere."""
        self._messages = {key: kept for key, kept in self._messages.items() if key[1] in roles}

    def prepared(self, role: int) -> m.Prepared | None:
        """Whether, and how, a role has said that it waits for its state."""
        found, _ = self._messages.get((m.Prepared, role, False), (None, 0.0))
        return found if isinstance(found, m.Prepared) else None

    def again(self, now: float) -> Iterator[m.OfRole]:
        """All that is kept, to be said again. What has failed is not younger for it."""
        for message, at in self._messages.values():
            yield replace(message, age=now - at) if isinstance(message, m.WorkerLost) else message

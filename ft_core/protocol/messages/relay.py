"""On the way between an agent and the controller: who speaks for whom."""

from __future__ import annotations

from ft_core.protocol.messages.values import Address, Message

# -- on the way between an agent and the controller -----------------------------------------------------


class RouteRequest(Message, frozen=True):
    """An agent's first word to the controller: may it stay, or is another to speak for it? `relay`: where it
    would take those for which it is to speak. `direct`: it may not be sent away, since it has others already,
    or could not use who was to speak for it."""

    relay: Address
    direct: bool


class UseRelay(Message, frozen=True):
    """The answer. `relay`: where it finds who speaks for it; empty: it is to greet here."""

    relay: str


class RelayLives(Message, frozen=True):
    """The controller has just said something: to an agent, from who speaks for it."""


class LeavingRelay(Message, frozen=True):
    """The agent lives, and ends its connection with who speaks for it, over which it says so."""

"""What happens to the controller, and what it has done about it: the machine's input and output.

`Controller.handle(event, now)` returns effects; the shell (`control.shell`) turns the world into events and
effects into the world, and does nothing else. A *peer* is a connection, by number: each new connection has
a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from ft_core.control.observe.observations import Observation, TimeGoes
from ft_core.protocol.messages import AgentHello, Message, Pulse

Peer = int


# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Greeted:
    """An agent's connection is there, and this was its first message."""

    peer: Peer
    hello: AgentHello


@dataclass(frozen=True)
class Received:
    """A message of an agent that has greeted, or a request of `ftctl`."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class MessageBatch:
    """Messages of agents that have greeted, which came at once, in order for each."""

    messages: Sequence[tuple[Peer, Message]]


@dataclass(frozen=True)
class Pulsed:
    """Nodes say that they live, or somebody repeats what they said."""

    pulses: Sequence[Pulse]


@dataclass(frozen=True)
class Disconnected:
    """The connection is no more; who was closed by an effect is heard of as well."""

    peer: Peer


@dataclass(frozen=True)
class Admitted:
    """A connection has shaken hands: whoever it is knows the job's secret, and will greet."""


@dataclass(frozen=True)
class Arriving:
    """How many connections are in their handshake, or have not greeted yet."""

    connections: int


@dataclass(frozen=True)
class Refused:
    """Somebody or something was refused, and why."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Some time has passed: 0.05 to 0.1 s of that in which this process was awake (`AwakeClock`)."""


@dataclass(frozen=True)
class Terminate:
    """SIGTERM has come."""


@dataclass(frozen=True)
class LauncherGone:
    """`ftrun`, which has started this process, is no more."""


@dataclass(frozen=True)
class Failed:
    """An error of this process's own, that its predecessors have met as well: the next one would too."""

    error: str


Event = (
    Greeted | Received | MessageBatch | Pulsed | Disconnected | Admitted | Arriving | Refused | Tick
    | Terminate | LauncherGone | Failed
)  # fmt: skip


# -- effects -------------------------------------------------------------------------------------------


class Send(Struct, frozen=True, gc=False):  # a hundred thousand at a time
    """Send a message: in order for each peer, and nothing happens if it is gone."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class Close:
    """End a connection."""

    peer: Peer


@dataclass(frozen=True)
class Record:
    """A line of `events.jsonl`; the shell adds the time."""

    event: str
    epoch: int
    reason: str = ""
    roles: tuple[int, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    time: TimeGoes | None = None
    """What the job's time goes to from here on. The observer adds to `more` what that comes to."""


@dataclass(frozen=True)
class AppendLedger:
    """A line of the ledger of samples."""

    line: str


@dataclass(frozen=True)
class PrintConsole:
    """Print a line for the person at the console."""

    text: str
    level: str = "INFO"


@dataclass(frozen=True)
class End:
    """The job is over, and all nodes are told (`Shutdown`): exit with this code once that has gone out."""

    code: int


@dataclass(frozen=True)
class Refuse:
    """Somebody was turned away, who may come again and again: `Refused` follows, now and then."""

    reason: str


@dataclass(frozen=True)
class Resign:
    """Somebody leads, or has led, in this term, which is newer: this controller is none any more."""

    term: int


Effect = Send | Close | Record | AppendLedger | PrintConsole | End | Refuse | Resign
Emitted = Effect | Observation
"""All that the machine emits; the observer keeps the rest to itself."""

"""What workers say to the store of an epoch (`comm.rendezvous_server`). An answer has its request's `id`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ft_core.protocol.codec import Decoder
from ft_core.protocol.messages import Epoch, Message, Role, Roles

Id = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)]

MAX_VALUE = 16 << 20
"""Bytes of one value. The largest are gloo's, some 100 bytes per member of a group."""


class JoinEpoch(Message, frozen=True):
    """Greets: whose store this connection is for, and who has it. Not answered, but `Asked` may come at any
    time; closed if that epoch is over."""

    epoch: Epoch
    role: Role


class SetKey(Message, frozen=True):
    """Set a key. It is not answered."""

    key: str
    value: bytes


class AddTo(Message, frozen=True):
    """Add to the number at `key`, which begins at 0. Answered by `Answered`: the sum."""

    id: Id
    key: str
    amount: Number


class CompareAndSet(Message, frozen=True):
    """Set `key` if it has the expected value, or none and nothing is expected. Answered by `Answered`: the
    value that it has then."""

    id: Id
    key: str
    expected: bytes
    value: bytes


class CheckKeys(Message, frozen=True):
    """Answered by `Answered`: whether all of them are there."""

    id: Id
    keys: list[str]


class DeleteKey(Message, frozen=True):
    """Answered by `Answered`: whether it was there."""

    id: Id
    key: str


class WaitForKeys(Message, frozen=True):
    """Answered by `Values`, once all of them are there."""

    id: Id
    keys: list[str]


class Ask(Message, frozen=True):
    """Have these roles open a group; not those that have come to meet in it. Not answered."""

    group: str
    roles: Roles


class Meet(Message, frozen=True):
    """This role has come to open a group. Answered by `Answered`, once so many have. `ask`: roles to ask."""

    id: Id
    group: str
    size: Annotated[int, Meta(ge=1)]
    ask: Roles | None


class Answered(Message, frozen=True):
    """The result of the request with this id."""

    id: Id
    value: bool | int | bytes


class Values(Message, frozen=True):
    """What was waited for, and what is beside it."""

    id: Id
    values: dict[str, bytes]


class Asked(Message, frozen=True):
    """Others open this group, and wait for this role."""

    group: str


Request = JoinEpoch | SetKey | AddTo | CompareAndSet | CheckKeys | DeleteKey | WaitForKeys | Ask | Meet
Reply = Answered | Values | Asked

REQUEST = Decoder[Request](Request)
REPLY = Decoder[Reply](Reply)

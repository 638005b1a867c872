"""The flight record: which operations of its process groups a role has begun and ended, and when.

Each worker writes its own into memory that its agent reads without its help (`comm.flight`,
`node.workers.flight`).
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from ft_core.errors import ProtocolError
from ft_core.process.doing import Seen
from ft_core.process.stacks import Frame
from ft_core.protocol.groups import GroupId

Kind = Literal[
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter",
    "barrier", "send", "recv",
]  # fmt: skip
"""What is done, whichever of torch's methods does it."""
KINDS: tuple[Kind, ...] = get_args(Kind)
POINT_TO_POINT: tuple[Kind, ...] = ("send", "recv")
UNDER_WAY = 0
"""`ended` of an operation that has not."""
NEWEST = 64
"""Ended operations of each group in what the controller asks for, beside those under way."""

_Natural = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
_OrNone = Annotated[int, Meta(ge=-1, le=(1 << 62) - 1)]
"""-1: none."""


class FlightGroup(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A process group. `id`: what the records of the same log call it. `name`: what all of its members call
    it (a `GroupId`'s text). `label`: what the script calls it. `backend`: what its communicator is made of,
    that of its GPUs if it has two."""

    id: _Natural
    name: str
    label: str = ""
    backend: str = "gloo"

    def __post_init__(self) -> None:
        try:
            GroupId.parse(self.name)
        except ProtocolError as error:
            raise ValueError(str(error)) from None

    @property
    def members(self) -> tuple[int, ...]:
        """Its roles in the order of their ranks in it, also those that are away in this epoch."""
        return tuple(sorted(role for run in GroupId.parse(self.name).runs for role in run))


class FlightRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An operation.

    `number`: which one of its epoch and group, from 0, the same on all members; of point-to-point operations,
    which one from that sender to that receiver. `nbytes`: of what this role gives, or of what it gets, where
    that is more. `peer`: the other role of a point-to-point operation, if it is known, else -1. `started`,
    `ended`: as `time.monotonic_ns` of its machine. It starts when it is issued, before its group has a
    communicator; it ends also when it fails. `step`: how many steps the role had finished then; -1: it did
    not train yet. `apart`: it was issued, and the role has not come to wait for it; with NCCL it may by other
    means than the operation's. `grad`: whether autograd recorded: it does in the forward pass of training,
    and not in that of an evaluation.
    """

    group: _Natural
    number: _Natural
    kind: Kind
    nbytes: _Natural
    dtype: Annotated[str, Meta(max_length=32)]
    peer: _OrNone
    started: _Natural
    ended: _Natural
    step: _OrNone = -1
    apart: bool = False
    grad: bool = False

    @property
    def under_way(self) -> bool:
        """Whether it has not ended."""
        return self.ended == UNDER_WAY


class Look(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that was looked at more closely, without its help.

    `main`: its main thread. `stack`: that one's in Python, the innermost frame first; empty where the kernel
    says enough, or it cannot be had. `below`: the processes that it has started, and those that they have.
    """

    main: Seen
    stack: tuple[Frame, ...] = ()
    below: tuple[Seen, ...] = ()


class FlightLog(Struct, frozen=True, forbid_unknown_fields=True):
    """What a role's worker has done in its newest epoch, as far as its record goes back.

    `version`: steps that its state has seen. `now`: when it was read, as `time.monotonic_ns` there. `state`:
    its main thread's, as /proc has it: R runs, S or D waits, T is stopped, Z or X has ended. `at_end`: it
    waits for others at the end of its script, or of a part of it. `records`: the oldest first. `moved`: bytes
    that the process and its children have read and written, of files, pipes and some sockets; 0: unknown.
    `fetches`: its agent still brings the state that it is to go on from. `look`: what it does, if that was
    asked for.
    """

    role: Annotated[int, Meta(ge=0, lt=1 << 31)]
    epoch: _Natural
    version: _OrNone
    now: _Natural
    state: Annotated[str, Meta(pattern=r"^[A-Za-z]\Z")]
    at_end: bool
    groups: tuple[FlightGroup, ...]
    records: tuple[FlightRecord, ...]
    moved: _Natural = 0
    fetches: bool = False
    look: Look | None = None

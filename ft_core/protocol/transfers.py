"""What one agent asks of another: segments of state, and what a newcomer on its node needs to know.

Sizes are in bytes, times in seconds. A segment is at most as large as the receiver of a request allows; that
its items do not overlap is for the receiver to check (`net.transport_server`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ft_core.protocol.codec import Decoder
from ft_core.protocol.messages import (
    AskProgress,
    AskStartupEntries,
    Epoch,
    Layout,
    Message,
    Progress,
    SegmentId,
    Size,
    StartupEntries,
    Version,
)

Checksum = Annotated[int, Meta(ge=0)]
"""xxh3_64 of a chunk."""
Token = Annotated[str, Meta(min_length=1, max_length=64)]
"""Names a transfer that has begun."""
Seconds = Annotated[float, Meta(gt=0)]
"""Seconds until the caller gives up."""
Index = Annotated[int, Meta(ge=0, lt=1 << 40)]
"""The index of a chunk."""
RUN = 4
"""Chunks in one message at most. To take each by itself costs as much again on cores that train, in whose
caches other things are; with more, training waits longer for a network that has just been taken."""
HeldVersion = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A version that somebody has."""


# -- requests ------------------------------------------------------------------------------------------


class PushSegment(Message, frozen=True):
    """May I leave a copy of this segment with you? Answered by `PushBegun`."""

    segment: Layout
    version: HeldVersion
    epoch: Epoch
    checksums: list[Checksum]
    seconds: Seconds


class Chunks(Message, frozen=True):
    """Some chunks of a push, one after the other, the payload. Not answered."""

    token: Token
    first: Index


class ChunksSent(Message, frozen=True):
    """All chunks of this connection are sent. Answered by `BadChunks`."""

    token: Token


class CommitPush(Message, frozen=True):
    """Every chunk is there: the copy is valid from now on. Answered by `Accepted`."""

    token: Token


class FetchSegment(Message, frozen=True):
    """Lend me a copy. Answered by `SegmentLent`."""

    segment: SegmentId
    version: HeldVersion
    seconds: Seconds


class ReadChunks(Message, frozen=True):
    """Send me `RUN` chunks from each of these on, as of `range`, as far as they are before `stop`. Answered
    by a `ChunksHere` for each."""

    token: Token
    first: Index
    stop: Index
    step: Annotated[int, Meta(ge=1, lt=1 << 40)]


class DoneReading(Message, frozen=True):
    """The copy is no longer needed. Answered by `Accepted`."""

    token: Token


class DescribeSegment(Message, frozen=True):
    """What is in a segment that you hold? Answered by `SegmentFound`."""

    segment: SegmentId
    version: Version


class StrikeCopy(Message, frozen=True):
    """Your copy is corrupt: use it no more. Answered by `Accepted`."""

    segment: SegmentId
    version: Version


class AskAlive(Message, frozen=True):
    """Are you there? Answered by `Alive`."""


class DescribeBuffers(Message, frozen=True):
    """How large are your snapshot buffers? Answered by `LargestBuffer`."""


Question = DescribeSegment | DescribeBuffers | StrikeCopy | AskStartupEntries | AskProgress | AskAlive
"""What an agent answers itself; the others are the transport's."""

Request = (
    PushSegment | Chunks | ChunksSent | CommitPush | FetchSegment | ReadChunks | DoneReading | Question
)  # fmt: skip


# -- answers -------------------------------------------------------------------------------------------


class PushBegun(Message, frozen=True):
    """Answers `PushSegment`; without a token: a verified copy is here already.

    `missing`: runs of chunks (the first, and the one after the last) that are not here already, in order.
    """

    token: str
    missing: list[tuple[Index, Index]]


class BadChunks(Message, frozen=True):
    """Answers `ChunksSent`: those that did not match their checksums."""

    chunks: list[Index]


class Accepted(Message, frozen=True):
    """What was asked for is done."""


class SegmentLent(Message, frozen=True):
    """Answers `FetchSegment`."""

    token: Token
    segment: Layout
    checksums: list[Checksum]


class ChunksHere(Message, frozen=True):
    """Some chunks of a fetch, one after the other, the payload."""

    first: Index


class SegmentFound(Message, frozen=True):
    """Answers `DescribeSegment`."""

    segment: Layout


class LargestBuffer(Message, frozen=True):
    """Answers `DescribeBuffers`; 0 without any."""

    nbytes: Size


class Alive(Message, frozen=True):
    """Answers `AskAlive`. `stalled`: seconds since the agent last did any work."""

    stalled: Annotated[float, Meta(ge=0)]


class Failed(Message, frozen=True):
    """A request could not be served. `corrupt`: since a copy does not match its checksums."""

    error: str
    corrupt: bool = False


Found = SegmentFound | LargestBuffer | Accepted | StartupEntries | Progress | Alive
"""Answers a `Question`."""

Answer = PushBegun | BadChunks | SegmentLent | ChunksHere | Found | Failed

REQUEST = Decoder[Request](Request)
ANSWER = Decoder[Answer](Answer)

"""What agents ask of each other besides transfers: layouts, bad copies, records of start-up collectives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from msgspec.structs import replace

from ft_core.errors import FtError
from ft_core.net.transport import TcpTransport
from ft_core.node.events import AskPeer, AskRecords, PeerAsks, RecordsFound
from ft_core.protocol import messages as m
from ft_core.protocol import transfers as t
from ft_core.state.store import NodeStore

log = logging.getLogger(__name__)

_DEADLINE = 10.0
_Answer = m.StartupEntries | m.Progress | str


class Inquiries:
    """The side of the one that is asked, for one agent."""

    def __init__(self, node: str, store: NodeStore, stalled: Callable[[], float]) -> None:
        self._node, self._store = node, store
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[_Answer]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stalled = stalled

    def open(self, handle: Callable[[PeerAsks], None]) -> None:
        """What a worker must be asked goes to `handle`, in the event loop that is running now."""
        self._handle = handle
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Nobody is asked any more: this event loop is about to end."""
        self._loop = None
        for future in list(self._waiting.values()):
            with contextlib.suppress(InvalidStateError):  # it was answered a moment ago
                future.set_result(f"node {self._node} is ending")

    def answer(self, question: t.Question) -> t.Found:
        """Another agent asks. Runs in a thread of the transport. Raises FtError."""
        match question:
            case t.DescribeSegment(name, version):
                if (found := self._store.find(name, version)) is None:
                    raise FtError(f"node {self._node} does not hold {name}")
                return t.SegmentFound(found[0].layout)
            case t.DescribeBuffers():
                return t.LargestBuffer(self._store.largest_buffer())
            case t.StrikeCopy(name, version):
                log.error(
                    "node %s: its copy of segment %s, version %s, is corrupt and struck off; another is used",
                    *(self._node, name, version),
                )
                self._store.strike(name, version)
                return t.Accepted()
            case m.AskStartupEntries() | m.AskProgress():
                answer = self._from_worker(replace(question, id=next(self._numbers)))
                if isinstance(answer, m.StartupEntries):
                    return answer
                wanted = question.tensor if isinstance(question, m.AskProgress) else ""
                version, envelope, tensor = self._store.envelope(question.holder, wanted)
                version = min(answer.version, version + 1)  # where not each is protected
                return replace(answer, version=version, envelope=envelope.decode(), tensor=tensor)
            case t.AskAlive():
                return t.Alive(self._stalled())

    def _from_worker(self, question: m.AskStartupEntries | m.AskProgress) -> m.StartupEntries | m.Progress:
        if (loop := self._loop) is None:
            raise FtError(f"node {self._node} is starting, or ending")
        future: Future[_Answer] = Future()
        self._waiting[question.id] = future
        try:
            loop.call_soon_threadsafe(self._handle, PeerAsks(question))
            answer = future.result(_DEADLINE)
        except TimeoutError:
            raise FtError(
                f"the worker of role {question.holder} did not answer within {_DEADLINE:.0f} s"
            ) from None
        finally:
            self._waiting.pop(question.id, None)
        if isinstance(answer, str):
            raise FtError(answer)
        return answer

    def answered(self, number: int, answer: _Answer) -> None:
        """A worker here has given what it was asked for; or why it cannot be asked."""
        if (waiting := self._waiting.get(number)) is not None:
            with contextlib.suppress(InvalidStateError):  # it was told that nobody answers
                waiting.set_result(answer)


def relay(asked: AskPeer, transport: TcpTransport) -> m.StartupEntries | m.Progress | m.Refused:
    """A newcomer here asks something of a role elsewhere: what that one's agent says. Waits for it."""
    question = asked.question
    try:
        found = transport.request(asked.address, question, _DEADLINE)
    except FtError as error:
        reason = f"asking role {question.holder} ({type(question).__name__}): {error}"
        return m.Refused(question.id, reason)
    if isinstance(found, m.StartupEntries | m.Progress):
        return replace(found, id=question.id)
    return m.Refused(question.id, f"the agent of role {question.holder} answered {found}")


def records_of(asked: AskRecords, transport: TcpTransport) -> RecordsFound:
    """What the worker of a role elsewhere has on record, as its agent says. Waits for it."""
    try:
        found = transport.request(asked.address, m.AskProgress(0, asked.role), _DEADLINE)
    except FtError as error:
        return RecordsFound(asked.role, asked.epoch, {}, str(error))
    if not isinstance(found, m.Progress):
        return RecordsFound(asked.role, asked.epoch, {}, f"its agent answered {found}")
    return RecordsFound(asked.role, asked.epoch, found.counts)

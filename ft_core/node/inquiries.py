"""What agents ask of each other besides transfers: layouts, bad copies, records of start-up collectives."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from ft_core.errors import FtError
from ft_core.net.transport import TcpTransport
from ft_core.node.workers import Worker, WorkerPool
from ft_core.protocol.messages import (
    AskProgress,
    AskStartupEntries,
    EntriesBrought,
    Progress,
    ProgressBrought,
    Refused,
    SendProgress,
    SendStartupEntries,
    StartupEntries,
    ToWorker,
)
from ft_core.protocol.transfers import (
    Accepted,
    DescribeSegment,
    EntriesFound,
    FetchEntries,
    FetchProgress,
    Found,
    ProgressFound,
    Question,
    SegmentFound,
    StrikeCopy,
)
from ft_core.state.store import NodeStore

log = logging.getLogger(__name__)
Message = dict[str, Any]

_DEADLINE = 10.0


class Inquiries:
    """Both sides of them, for one agent. Made in its event loop."""

    def __init__(self, node: str, store: NodeStore, pool: WorkerPool, transport: TcpTransport) -> None:
        self._node, self._store, self._pool, self._transport = node, store, pool, transport
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[StartupEntries | Progress]] = {}

    def answer(self, question: Question) -> Found:
        """Another agent asks. Runs in a thread of the transport. Raises FtError."""
        match question:
            case DescribeSegment(name, version):
                if (found := self._store.find(name, version)) is None:
                    raise FtError(f"node {self._node} does not hold {name}")
                return SegmentFound(found[0].layout)
            case StrikeCopy(name, version):
                log.error(
                    "node %s: its copy of segment %s, version %s, is corrupt and struck off; another is used",
                    *(self._node, name, version),
                )
                self._store.strike(name, version)
                return Accepted()
            case FetchEntries(holder, group, start):
                told = self._from_worker(holder, lambda number: SendStartupEntries(number, group, start))
                assert isinstance(told, StartupEntries)
                return EntriesFound(told.entries)
            case FetchProgress(holder):
                said = self._from_worker(holder, SendProgress)
                assert isinstance(said, Progress)
                return ProgressFound(said.version, said.counts, self._store.envelope(holder).decode())

    def answered(self, message: StartupEntries | Progress) -> None:
        """A worker here has given its record."""
        if (waiting := self._waiting.pop(message.id, None)) is not None and not waiting.done():
            waiting.set_result(message)

    async def relay(self, worker: Worker, asked: AskStartupEntries | AskProgress, plan: Message) -> None:
        """A newcomer here asks something of a role elsewhere, `holder`: ask that one's agent."""
        question: FetchEntries | FetchProgress
        if isinstance(asked, AskStartupEntries):
            question = FetchEntries(asked.holder, asked.group, asked.start)
        else:
            question = FetchProgress(asked.holder)
        try:
            address = plan["nodes"][plan["roles"][str(asked.holder)]]["data"]
            found = await asyncio.to_thread(self._transport.request, address, question, _DEADLINE)
        except (FtError, KeyError) as error:
            reason = f"asking role {asked.holder} ({type(question).__name__}): {error}"
            worker.post(Refused(asked.id, reason))
            return
        if isinstance(found, EntriesFound):
            worker.post(EntriesBrought(asked.id, found.entries))
        elif isinstance(found, ProgressFound):
            worker.post(ProgressBrought(asked.id, found.version, found.counts, found.envelope))
        else:
            worker.post(Refused(asked.id, f"the agent of role {asked.holder} answered {found}"))

    def _from_worker(self, role: int, ask: Callable[[int], ToWorker]) -> StartupEntries | Progress:
        return asyncio.run_coroutine_threadsafe(self._ask_worker(role, ask), self._loop).result(_DEADLINE)

    async def _ask_worker(self, role: int, ask: Callable[[int], ToWorker]) -> StartupEntries | Progress:
        worker = self._pool.of_role(role)
        if worker is None or worker.channel is None:
            raise FtError(f"role {role} has no worker on node {self._node}")
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        worker.post(ask(number))
        return await asyncio.wait_for(self._waiting[number], _DEADLINE)

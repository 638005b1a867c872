"""What agents ask of each other besides transfers: layouts, bad copies, records of start-up collectives."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

from ft_core.errors import FtError
from ft_core.store import NodeStore
from ft_core.transport import TcpTransport
from ft_core.workers import Worker, WorkerPool

log = logging.getLogger(__name__)
Message = dict[str, Any]

_DEADLINE = 10.0


class Inquiries:
    """Both sides of them, for one agent. Made in its event loop."""

    def __init__(self, node: str, store: NodeStore, pool: WorkerPool, transport: TcpTransport) -> None:
        self._node, self._store, self._pool, self._transport = node, store, pool, transport
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}

    def answer(self, question: Message) -> Message:
        """Another agent asks. Runs in a thread of the transport."""
        kind = question.get("ask")
        if kind == "segment":
            found = self._store.find(str(question["segment"]), int(question["version"]))
            if found is None:
                return {"error": f"node {self._node} does not hold {question['segment']}"}
            return {"segment": found[0].to_json()}
        if kind == "strike":
            log.error(
                "node %s: its copy of segment %s, version %s, is corrupt and struck off; another is used",
                *(self._node, question["segment"], question["version"]),
            )
            self._store.strike(str(question["segment"]), int(question["version"]))
            return {}
        if kind == "startup":
            entries = asyncio.run_coroutine_threadsafe(self._record_of(question), self._loop)
            return entries.result(_DEADLINE)
        return {"error": "unknown question"}

    def answered(self, message: Message) -> None:
        """A worker here has given its record."""
        if (waiting := self._waiting.pop(message["id"], None)) is not None and not waiting.done():
            waiting.set_result(message)

    async def fetch_startup(self, worker: Worker, message: Message, plan: Message) -> None:
        """A newcomer here needs a peer's record of start-up collectives: ask the peer's agent."""
        reply: Message = {"type": "reply", "id": message["id"]}
        try:
            node = plan["roles"][str(message["holder"])]
            question = {"ask": "startup", **{k: message[k] for k in ("holder", "group", "start")}}
            address = plan["nodes"][node]["data"]
            reply |= await asyncio.to_thread(self._transport.request, address, question, _DEADLINE)
        except (FtError, KeyError) as error:
            reply["error"] = f"start-up record of role {message['holder']}: {error}"
        worker.post(reply)

    async def _record_of(self, question: Message) -> Message:
        worker = self._pool.of_role(int(question["holder"]))
        if worker is None or worker.channel is None:
            return {"error": f"role {question['holder']} has no worker on node {self._node}"}
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        asked = {"group": str(question["group"]), "start": int(question["start"])}
        worker.post({"type": "startup_entries", "id": number, **asked})
        return {"entries": (await asyncio.wait_for(self._waiting[number], _DEADLINE))["entries"]}

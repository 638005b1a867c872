"""What agents ask of each other besides transfers: layouts, bad copies, records of start-up collectives."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

from ft_core.errors import FtError
from ft_core.net.transport import TcpTransport
from ft_core.node.workers import Worker, WorkerPool
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
        holder = int(question.get("holder", -1))
        if kind == "startup":
            asked = {"group": str(question["group"]), "start": int(question["start"])}
            return {"entries": self._from_worker(holder, {"type": "startup_entries", **asked})["entries"]}
        if kind == "progress":
            said = self._from_worker(holder, {"type": "progress"})
            envelope = self._store.envelope(holder).decode()
            return {"version": said["version"], "counts": said["counts"], "envelope": envelope}
        return {"error": "unknown question"}

    def answered(self, message: Message) -> None:
        """A worker here has given its record."""
        if (waiting := self._waiting.pop(message["id"], None)) is not None and not waiting.done():
            waiting.set_result(message)

    async def relay(self, worker: Worker, message: Message, plan: Message) -> None:
        """A newcomer here asks something of a role elsewhere, `holder`: ask that one's agent."""
        reply: Message = {"type": "reply", "id": message["id"]}
        try:
            node = plan["roles"][str(message["holder"])]
            question = {key: value for key, value in message.items() if key not in ("type", "id")}
            address = plan["nodes"][node]["data"]
            reply |= await asyncio.to_thread(self._transport.request, address, question, _DEADLINE)
        except (FtError, KeyError) as error:
            reply["error"] = f"asking role {message['holder']} for its {message['ask']}: {error}"
        worker.post(reply)

    def _from_worker(self, role: int, message: Message) -> Message:
        return asyncio.run_coroutine_threadsafe(self._ask_worker(role, message), self._loop).result(_DEADLINE)

    async def _ask_worker(self, role: int, message: Message) -> Message:
        worker = self._pool.of_role(role)
        if worker is None or worker.channel is None:
            raise FtError(f"role {role} has no worker on node {self._node}")
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        worker.post({**message, "id": number})
        return await asyncio.wait_for(self._waiting[number], _DEADLINE)

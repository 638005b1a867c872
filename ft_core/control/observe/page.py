"""The job's page: what a browser is served, and what it may ask for.

Everything a browser sends is checked here, and nothing of it is sent back. Without the operator's token all
of it reads only. What is to be done goes to the controller as it does from `ftctl`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ft_core.control.observe.operator import Operator, token_of, write_url
from ft_core.control.observe.overview import Node, Overview
from ft_core.control.observe.past import Past
from ft_core.control.observe.series import Sample, Series
from ft_core.elastic import ledger
from ft_core.protocol import http
from ft_core.protocol import messages as m
from ft_core.protocol.flight import FlightLog
from ft_core.protocol.http import Numbering

log = logging.getLogger(__name__)
T = TypeVar("T")
Ask = Callable[[m.FromCtl], Awaitable[concurrent.futures.Future[m.ToCtl]]]

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "grid.js": "text/javascript; charset=utf-8",
    "details.js": "text/javascript; charset=utf-8",
    "plots.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "elements.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "uplot/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.min.css": "text/css; charset=utf-8",
}
"""Files in `web`, and their types."""
EVERY = 1.0
"""Seconds between two looks at the job, while somebody does; of a very large one, more."""
BEHIND = 8
"""Looks of which a browser may not have been told yet; then it is told no more, and may come again."""
SAMPLES = 2000
BODY = 4 << 10
"""Bytes of what is asked for."""
RECORDS = 200
"""The newest operations of a flight record that are shown."""
STACKS = 8
STACK = 32 << 10
"""Bytes of one."""
STEPS = 50
"""The newest steps of the ledger that are shown."""
_STACK = re.compile(r"role-(\d{1,9})-(\d{1,9})\.txt")
_PATIENCE = 8.0
"""Seconds for an answer that an agent has to give."""


class Action(Struct, forbid_unknown_fields=True):
    """What is to be done; `confirm`: the word that was given when it was asked for."""

    confirm: Annotated[str, Meta(max_length=64)] = ""


class Kill(Action, tag="kill", tag_field="do", forbid_unknown_fields=True):
    """A worker, or a whole node."""

    role: m.Role | None = None
    node: m.NodeName | None = None


class ForgiveNode(Action, tag="forgive", tag_field="do", forbid_unknown_fields=True):
    """Forget what counts against it."""

    node: m.NodeName = ""


class Drain(Action, tag="drain", tag_field="do", forbid_unknown_fields=True):
    """Take it out, without a failure."""

    node: m.NodeName = ""


_ACTION = msgspec.json.Decoder(Kill | ForgiveNode | Drain)


class Page:
    """The page of one controller. It is made, and lives, in the thread that serves it."""

    def __init__(
        self, job_dir: Path, secret: bytes, address: str, url: str, overviews: Numbering[Overview], ask: Ask
    ) -> None:
        """`address`: as it was asked for; `url`: where the page is."""
        self._job_dir, self._overviews, self._ask = job_dir, overviews, ask
        token = token_of(secret)
        self._operator = Operator(token, address)
        write_url(job_dir, url, token)
        self._past = Past(job_dir / "events.jsonl")
        self._series = Series(SAMPLES, EVERY)
        self._began = False
        """Whether what was before is in there."""
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._nodes = 0
        self._shown: dict[str, Node] = {}
        self._job: dict[str, Any] = {}
        self._told = 0
        self._looked = -math.inf
        self._whole = b""
        """What `_state` says, once somebody has asked since the last look."""
        web = resources.files("ft_core.control.observe") / "web"
        self._files = {f"/{name}": ((web / name).read_bytes(), kind) for name, kind in FILES.items()}
        self._files["/"] = self._files["/index.html"]
        self._reading: dict[str, concurrent.futures.Future[object]] = {}
        """What threads read from a disk, which may hang: each once, whoever asks."""

    def routes(self) -> list[Route]:
        """All paths, each with what answers."""
        found = [Route(path, self._reads(self._file), methods=["GET"]) for path in self._files]
        for name, answer in {
            "stream": self._stream,
            "node": self._node,
            "flight": self._flight,
            "stacks": self._stacks,
            "ledger": self._ledger,
            "may": self._may,
        }.items():
            found.append(Route(f"/api/{name}", self._reads(answer), methods=["GET"]))
        return [*found, Route("/api/act", self._reads(self._act), methods=["POST"])]

    async def run(self) -> None:
        """Looks at the job as long as it is served."""
        self._past.start()
        try:
            while True:
                began = time.monotonic()
                if self._listeners:
                    await self._look()
                elif self._due() and (found := await self._overviews.get()) is not None:
                    self._sample(found)  # plots go on while nobody looks, and nothing else does
                # Of ten thousand nodes each look takes the controller some milliseconds.
                pause = max(EVERY, self._nodes / 2000)
                await asyncio.sleep(max(0.1, pause - (time.monotonic() - began)))
        finally:
            self._past.close()

    # -- what is sent to all -----------------------------------------------------------------------

    def _due(self) -> bool:
        last = self._series.samples[-1][0] if self._series.samples else None
        return last is None or time.time() - last >= self._series.every

    async def _look(self) -> None:
        """Say what has changed."""
        if time.monotonic() - self._looked < http.FRESH:
            return  # many who come at once are told the same
        if (found := await self._overviews.get()) is None:
            return
        self._looked = time.monotonic()
        told, rows = self._past.told, found.rows()
        job = {"name": self._job_dir.resolve().name, **found.job()}
        news: dict[str, Any] = {"job": job, "sample": self._sample(found)}
        if changed := {name: row for name, row in rows.items() if self._shown.get(name) != row}:
            news["nodes"] = changed
        if gone := [name for name in self._shown if name not in rows]:
            news["gone"] = gone
        if told.number != self._told:
            news |= _happened(told)
        self._shown, self._job, self._told = rows, job, told.number
        self._whole = b""
        self._say(_event("news", news))

    def _sample(self, found: Overview) -> Sample:
        told, numbers, self._nodes = self._past.told, found.numbers, len(found.nodes)
        if not self._began and told.number:
            self._began = True
            self._series.begin([(at, step, good, None, done, None) for at, step, good, done in told.points])
        now, most = round(time.time(), 2), (numbers.spares, numbers.step, numbers.loss)
        sample = (now, found.step_s, found.goodput, *most)
        self._series.add(sample)
        return sample

    def _say(self, event: bytes) -> None:
        for listener in list(self._listeners):
            try:
                listener.put_nowait(event)
            except asyncio.QueueFull:  # it does not take what it is sent
                self._listeners.discard(listener)
                listener.get_nowait()
                listener.put_nowait(None)

    def _state(self) -> bytes:
        """All that is known, for somebody who has come now."""
        if not self._whole:
            whole = {"job": self._job, "nodes": self._shown, "series": self._series.samples}
            self._whole = _event("state", whole | _happened(self._past.told))
        return self._whole

    async def _stream(self, _: Request) -> Response:
        listener: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND)
        await self._look()
        self._listeners.add(listener)

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"retry: 2000\n\n" + self._state()
                while (event := await listener.get()) is not None:
                    yield event
            finally:
                self._listeners.discard(listener)

        return StreamingResponse(events(), media_type="text/event-stream")

    # -- what is asked for -------------------------------------------------------------------------

    def _reads(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        """A page for readers, with what holds for all requests."""

        async def guarded(request: Request) -> Response:
            if not self._operator.may_read(request.headers):
                return Response("call this machine by its address\n", 421, media_type="text/plain")
            return await answer(request)

        return guarded

    async def _file(self, request: Request) -> Response:
        content, kind = self._files[request.scope["path"]]
        return Response(content, media_type=kind)

    async def _may(self, request: Request) -> Response:
        """Whether the token is right."""
        return _json({}) if self._operator.may_act(request.headers) else _no(401, "the token is another")

    async def _node(self, request: Request) -> Response:
        if (found := await self._overviews.get()) is None:
            return _no(503, "the controller does not answer")
        about = found.node(request.query_params.get("name", ""))
        return _json(about) if about is not None else _no(404, "there is no such node")

    async def _flight(self, request: Request) -> Response:
        role = request.query_params.get("role", "")
        if not re.fullmatch(r"[0-9]{1,9}", role):
            return _no(400, "which role?")
        match await self._answer(m.DescribeFlight(int(role))):
            case m.RoleFlight(_, log) if log is not None:
                return _json(_flight(log))
            case m.RoleFlight():
                return _no(404, "no worker of this role has begun on its node")
            case m.Denied(error):
                return _no(404, error)
        return _no(503, "the controller does not answer")

    async def _stacks(self, _: Request) -> Response:
        return await self._apart("stacks", lambda: _stacks(self._job_dir / "hangs"))

    async def _ledger(self, _: Request) -> Response:
        return await self._apart("ledger", lambda: _ledger(self._job_dir / ledger.NAME))

    async def _apart(self, what: str, read: Callable[[], object]) -> Response:
        """What a thread of its own reads. Who asks meanwhile waits for the same."""
        waiting = self._reading.get(what)
        if waiting is None or waiting.done():
            waiting = self._reading[what] = _in_thread(read)
        try:
            async with asyncio.timeout(http.SECONDS):
                return _json(await asyncio.shield(asyncio.wrap_future(waiting)))
        except TimeoutError:
            return _no(503, "the disk does not answer")
        except OSError:
            return _no(503, "it cannot be read")

    async def _act(self, request: Request) -> Response:
        if not self._operator.of_this_page(request.headers):
            return _no(403, "another page asks for this")
        if not self._operator.may_act(request.headers):
            return _no(401, "whoever acts needs the operator's token")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _no(415, "JSON is expected")
        try:
            async with asyncio.timeout(http.ASKS):
                body = b""
                async for part in request.stream():
                    body += part
                    if len(body) > BODY:
                        return _no(413, "that is too long")
            asked = _ACTION.decode(body)
        except TimeoutError:
            return _no(408, "that took too long")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return _no(400, "no such action")
        if (found := await self._overviews.get()) is None:
            return _no(503, "the controller does not answer")
        question: m.FromCtl
        loss = moves = None
        match asked:
            case Kill(role=None, node=str(node)) if found.has_node(node):
                question, says = m.Inject(node=node), f"SIGKILL everything on node {node}"
                loss = found.loss(node)
            case Kill(role=int(role), node=None) if found.has_role(role):
                question, says = m.Inject(role=role), f"SIGKILL the worker of role {role}"
            case ForgiveNode(node=node) if node in found.struck:
                question, says = m.Forgive(node), f"forget what counts against node {node}"
            case Drain(node=node) if found.has_node(node):
                question, says = m.DrainNode(node), f"take node {node} out"
                moves = found.drain(node)
            case _:
                return _no(404, "there is no such node or role")
        if not self._operator.confirmed(says, asked.confirm):
            about = {"says": says, "loss": loss, "moves": moves}
            return _json({"confirm": self._operator.ask(says), **about}, 202)
        match await self._answer(question):
            case m.Injected(killed):
                who = killed if isinstance(killed, str) else f"role {killed}"
                return _json({"done": f"killed {who}"})
            case m.Forgiven(node, strikes):
                return _json({"done": f"forgiven {node}: {strikes} strikes"})
            case m.Drains(node, roles):
                return _json({"done": f"draining {node}: {roles} roles move, then it ends"})
            case m.Denied(error) if moves is not None:
                return _no(409, error)
            case m.Denied():
                return _no(404, "there is no such node or role any more")
        return _no(503, "the controller does not answer")

    async def _answer(self, question: m.FromCtl) -> m.ToCtl | None:
        """The answer of the controller, or of the agent that it asks; None: there is none."""
        try:
            waiting = await self._ask(question)
            async with asyncio.timeout(_PATIENCE):
                return await asyncio.wrap_future(waiting)
        except (RuntimeError, TimeoutError, ConnectionError):
            return None


def _event(name: str, content: object) -> bytes:
    """One event of a stream; JSON has no line's end in it."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


def _happened(told: Any) -> dict[str, Any]:
    return {"recoveries": told.recoveries, "phases": told.phases, "events": told.events}


def _json(content: object, code: int = 200) -> Response:
    return Response(msgspec.json.encode(content), code, media_type="application/json")


def _no(code: int, why: str) -> Response:
    """`why` is a sentence of ours."""
    return _json({"error": why}, code)


def _in_thread(read: Callable[[], object]) -> concurrent.futures.Future[object]:
    waiting: concurrent.futures.Future[object] = concurrent.futures.Future()

    def run() -> None:
        try:
            found = read()
        except Exception as error:  # it is told of where it is asked for
            waiting.set_exception(error)
        else:
            waiting.set_result(found)

    threading.Thread(target=run, name="ft-page-file", daemon=True).start()
    return waiting


def _flight(log: FlightLog) -> dict[str, Any]:
    """A flight record for people: times are seconds before it was read."""
    groups = {group.id: f"{group.label} {group.name}".strip() for group in log.groups}
    return {
        "role": log.role,
        "epoch": log.epoch,
        "version": log.version,
        "state": log.state,
        "at_end": log.at_end,
        "records": [
            {
                "group": groups.get(each.group, ""),
                "number": each.number,
                "kind": each.kind,
                "bytes": each.nbytes,
                "peer": each.peer,
                "ago": (log.now - each.started) / 1e9,
                "took": None if each.under_way else (each.ended - each.started) / 1e9,
            }
            for each in log.records[-RECORDS:]
        ],
    }


def _stacks(directory: Path) -> list[dict[str, Any]]:
    """The stacks of workers that hung, as far as they were written on this machine; the newest first."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if named := _STACK.fullmatch(path.name):
            found.append((path.stat().st_mtime, int(named[1]), int(named[2]), path))
    newest = sorted(found, reverse=True)[:STACKS]
    return [{"time": at, "role": role, "pid": pid, "text": _begins(path)} for at, role, pid, path in newest]


def _begins(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(STACK).decode(errors="replace")


def _ledger(path: Path) -> list[dict[str, Any]]:
    """The newest steps first."""
    if not path.is_file():
        return []
    lines: deque[dict[str, Any]] = deque(maxlen=STEPS)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - (256 << 10)))
        for line in file.read().splitlines()[1 if size > 256 << 10 else 0 :]:
            try:
                record = ledger.Record.from_json(msgspec.json.decode(line))
            except (ValueError, AttributeError, TypeError):
                continue  # an epoch's line, or a torn one
            lines.append(record.to_json())
    return list(reversed(lines))

"""The controller's process: turns the world into events of `control.machine`, and effects into the world."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from ft_core import leadership
from ft_core.control import events as e
from ft_core.control import pulse_listener
from ft_core.control.hooks import AT_THE_END, Hooks
from ft_core.control.lead.lease_renewer import LeaseRenewer
from ft_core.control.machine import FAILURES, Controller
from ft_core.control.observe.inside import Reply
from ft_core.control.observe.metrics import PAGES
from ft_core.control.relays import BEATS, Branch, Client, Member, Other, Said, Tree
from ft_core.elastic import ledger
from ft_core.errors import AuthenticationError, ConfigError, ProtocolError
from ft_core.leadership.base import Notes
from ft_core.leadership.lease import Lease, clock
from ft_core.process import parent, sigterm
from ft_core.process.async_writer import FileWriter, say
from ft_core.process.awake import AwakeClock
from ft_core.process.collector import WhenQuiet
from ft_core.process.lines import LOG_CONTEXT
from ft_core.process.refusals import Refusals
from ft_core.process.tasks import Tasks
from ft_core.protocol import acceptor, handshake
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.bundle import Bundle, OrBundle
from ft_core.protocol.codec import encode
from ft_core.protocol.connection import Connection
from ft_core.protocol.goodput import Spent
from ft_core.protocol.http import Numbering, Site, called
from ft_core.protocol.http_server import Server
from ft_core.protocol.pulses import receiver
from ft_core.protocol.sockets import listen, split_address
from ft_core.settings import Settings, job_id

log = logging.getLogger(__name__)

TICK = 0.05
PORT_RETRY = 0.2
_ADVICE = {
    errno.EADDRINUSE: ". Something else has that port on this machine: end it, or give another port, the "
    "same on all nodes (--rdzv-endpoint HOST:PORT, or --master-port)",
    errno.EADDRNOTAVAIL: ". That is no address of this machine: the node that is started with --node-rank 0 "
    "must be the one that --rdzv-endpoint names",
}
_TABLES = 8
"""Pieces of tables of nodes that are kept as they were encoded: of a hundred thousand roles there are two."""
LAST_LINES = 3.0
"""Seconds that files, the console and the nodes have, each, to take what is still to be told at the end."""

_MAY_SAY: dict[type, tuple[type, ...]] = {
    m.AgentHello: get_args(m.FromAgent),
    m.CtlHello: get_args(m.FromCtl),
}
"""What may be said after each kind of greeting."""
_CLIENTS = OrBundle(m.FROM_CLIENT)


@dataclass
class LeaderContext:
    """What a controller has by its election."""

    lease: Lease
    renewer: LeaseRenewer
    address: str
    """Where it is to listen."""
    notes: Notes
    """The notes of its predecessors."""
    settled: float
    """Seconds of its own before which it may decide nothing."""
    job: str
    """The job's id."""


class Shell:
    """Input and output of one controller."""

    def __init__(
        self,
        settings: Settings,
        secret: bytes,
        job_dir: Path,
        failed_before: int | None = None,
        leader: LeaderContext | None = None,
    ) -> None:
        """`failed_before`: None for the job's first controller; else how many in a row have failed until now
        of an error of their own. `leader`: of a controller that was elected."""
        self.settings, self.job_dir, self._failed_before = settings, job_dir, failed_before
        self._leader, self._lease = leader, leader.lease if leader is not None else Lease(1)
        self.newer = 0
        """A term above this one, in which somebody leads or has led; 0: none is known."""
        self._held: list[e.Effect] | None = None
        """The job's end, until that is agreed to by whoever keeps the lease."""
        self._agreed = False
        self._secret = secret
        self.events, self._samples = FileWriter(job_dir / "events.jsonl"), FileWriter(job_dir / ledger.NAME)
        if leader is None:
            self.notes, settled = _notes(job_dir / "events.jsonl"), 0.0
            self.job = job_id(job_dir, settings.run_id)
        else:
            self.notes, settled, self.job = leader.notes, leader.settled, leader.job
        self.machine = Controller(
            *(settings, str(job_dir), lambda: secrets.token_hex(4), self.notes.recorded),
            job=self.job,
            pid=os.getpid(),
            term=self._lease.term,
            settled=settled,
            spent=self.notes.spent,
            ago=time.time() - self.notes.at,
            wall=time.monotonic(),
        )
        self._hooks = Hooks(settings.hooks, {"FT_JOB_ID": self.job, "FT_JOB_DIR": str(job_dir)})
        self.clock = AwakeClock(2 * TICK)
        self._collector = WhenQuiet()
        self._refusals = Refusals(lambda reason: self._handle(e.Refused(reason)))
        self._numbers = itertools.count()
        self._channels: dict[e.Peer, Client | Member | Reply] = {}
        self._tree = Tree(
            settings, self._enter, self._heard, self._heard_together, self._left, self._refusals.add
        )
        self._tables: dict[int, tuple[m.Hosts, bytes]] = {}
        """The tables that were sent last, encoded, by the identity of the message."""
        self._arriving = 0
        self._done: asyncio.Future[int | None]

    async def run(self) -> int | None:
        """Serve until the job ends. Returns its exit code; None once another may lead it. Raises what this
        process cannot cope with."""
        try:
            return await self._serve()
        finally:
            self._collector.close()
            self._hooks.close()
            for writer in (self.events, self._samples):
                writer.close()
                if not await asyncio.to_thread(writer.flush, LAST_LINES):
                    log.error("%s: its last lines could not be written", self.job_dir / writer.name)

    async def _serve(self) -> int | None:
        self._done = asyncio.get_running_loop().create_future()
        tasks = Tasks(self._fail)
        listener, datagrams = await self._listen()
        tasks.spawn(acceptor.serve(listener, self._secret, "the controller", self._accept))
        self._handle(e.Arriving(0))  # it begins
        LOG_CONTEXT.about = lambda: {
            "epoch": self.machine.cluster.epoch,
            "step": self.machine.view.account.version,
        }
        http = self._serve_http()
        if self._leader is None:  # or it goes when its node does, see `control.lead.candidate`
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._handle, e.Terminate())
        tasks.spawn(self._tick())
        tasks.spawn(self._beat())
        try:
            with pulse_listener.heard(datagrams, self._secret, self._pulsed, self._refusals.add):
                code = await self._done
                sigterm.ignore()
                if code is not None:
                    await self._see_off()
        finally:  # and who leads next, maybe here, finds the port free
            await asyncio.gather(*tasks.cancel(), return_exceptions=True)
            if http is not None:
                http.close()
        if code is None:
            for channel in self._channels.values():
                channel.close()
            return None
        self._tree.flush()
        hooks = asyncio.create_task(asyncio.to_thread(self._hooks.finish, AT_THE_END))
        with contextlib.suppress(TimeoutError):  # of one that takes nothing any more
            async with asyncio.timeout(LAST_LINES):
                flushed = (channel.drain() for channel in self._channels.values())
                await asyncio.gather(*flushed, return_exceptions=True)
        await hooks
        return code

    async def _see_off(self) -> None:
        """Have agents that others speak for leave before who is of no use would count as silent."""
        peers = self.machine.cluster.peers
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.silence_limit):
                await self._tree.end(peers.__contains__)

    def _serve_http(self) -> Server | None:
        """No job ends, or waits, because of who looks at it."""
        loop, machine = asyncio.get_running_loop(), self.machine
        numbers = Numbering(loop, lambda: machine.view.numbers(time.monotonic(), time.time()))
        overviews = Numbering(loop, lambda: machine.view.overview(time.monotonic(), time.time()))

        def page(url: str) -> Site:
            from ft_core.control.observe.page import Page  # in the thread that serves it

            about = (self.job_dir, self._secret, self.settings.http, url)
            return Page(*about, overviews, lambda question: called(loop, lambda: self._ask(question)))

        try:
            server = Server(self.settings.http, numbers, PAGES, page)
        except OSError as error:
            log.warning("no metrics: --ft-http %s: %s", self.settings.http, error)
            return None
        server.start(self.job_dir)
        return server

    def _ask(self, question: m.FromCtl) -> concurrent.futures.Future[m.ToCtl]:
        """What `ftctl` may ask, for somebody in this process."""
        loop, peer, reply = asyncio.get_running_loop(), next(self._numbers), Reply()
        self._channels[peer] = reply

        def over() -> None:
            del self._channels[peer]
            self._handle(e.Disconnected(peer))

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the job is over
                loop.call_soon_threadsafe(over)

        reply.answer.add_done_callback(done)
        self._handle(e.Received(peer, question))
        return reply.answer

    async def _listen(self) -> tuple[socket.socket, socket.socket]:
        """Listen for connections, and for pulses at the same port."""
        if self._leader is not None:
            address = self._leader.address
        else:
            address = leadership.at(self.settings.controller, self._secret, self.settings.size[0]).near
        said = False
        while True:
            try:
                listener = listen(*split_address(address))
                try:
                    return listener, receiver(*listener.getsockname()[:2])
                except OSError as error:
                    listener.close()
                    raise OSError(error.errno, f"for datagrams (UDP): {error.strerror}") from None
            except OSError as error:
                if self._failed_before is None:
                    advice = _ADVICE.get(error.errno or 0, "")
                    problem = f"the controller cannot listen at {address}: {error}{advice}"
                    raise ConfigError(problem) from None
                if not said:  # training goes on meanwhile; whoever has the port may leave
                    log.warning("a new controller cannot listen at %s yet: %s", address, error)
                said = True
            await asyncio.sleep(PORT_RETRY)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if parent.gone():
                self._handle(e.LauncherGone())
            self._tree.tick(self.clock.tick())
            self._refusals.tick()
            self._handle(e.Tick())
            self._collector.tick(self.machine.busy, self.clock.now)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.settings.silence_limit / BEATS)
            self._tree.beat()

    # -- events and effects --------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        if self._done.done() and (
            self._done.exception() is not None
            or self._done.result() is None
            or not isinstance(event, e.Greeted)
        ):
            return  # it has failed, or is none any more; or the job is over, as who comes is told
        if not self._leads():
            return
        try:
            effects = self.machine.handle(event, self.clock.now, time.monotonic())
            if self._leads():  # that may have taken its time
                self._agree(effects)
        except Exception as error:
            self._fail(error)

    def _leads(self) -> bool:
        """Whether it still does. If not, nothing is decided any more, nor is what has been carried out."""
        if self._agreed or self._lease.holds(clock()):
            return True
        self._resign("its lease may have run out")
        return False

    def _resign(self, why: str) -> None:
        if not self._done.done():
            log.warning("this controller, of term %d, leads no more: %s", self._lease.term, why)
            self._done.set_result(None)

    def _agree(self, effects: list[e.Effect]) -> None:
        """Carry out the effects of an event; but the job's end, and what follows it, only once whoever keeps
        the lease has taken note."""
        ends = [effect.code for effect in effects if isinstance(effect, e.End)]
        if self._held is not None:
            self._held += effects
        elif not ends or self._agreed or self._leader is None:
            self._carry_out(effects)
        else:
            self._held = effects
            self._leader.renewer.end(self._lease.term, ends[0], self._end_is_agreed)

    def _end_is_agreed(self) -> None:
        held, self._held, self._agreed = self._held, None, True
        self._carry_out(held or [])

    def _carry_out(self, effects: list[e.Effect]) -> None:
        encoded: dict[int, bytes] = {}  # what goes to all nodes is one object
        ignored = contextlib.suppress(ConnectionError)  # it is noticed by its reader
        for effect in effects:
            match effect:
                case e.Send(peer, message):
                    if (channel := self._channels.get(peer)) is None:
                        continue
                    if (body := encoded.get(id(message))) is None:
                        body = encoded[id(message)] = self._encoded(message)
                    with ignored:
                        channel.post_encoded(body)
                case e.Close(peer):
                    if (channel := self._channels.get(peer)) is not None:
                        channel.close()
                case e.Record():
                    self.events.write(line := _line(effect, self._lease.term))
                    self._hooks.tell(effect, line)
                    self._note(effect)
                case e.AppendLedger(line):
                    self._samples.write(line)
                case e.PrintConsole(text, level):
                    say(text, level)
                case e.End(code):
                    if not self._done.done():
                        self._done.set_result(code)
                case e.Refuse(reason):
                    self._refusals.add(reason)
                case e.Resign(term):
                    self.newer = term
                    self._resign(f"there is a leader of term {term}, or was one")

    def _encoded(self, message: m.Message) -> bytes:
        """The table of nodes is said to each who comes, and takes milliseconds to compress."""
        if not isinstance(message, m.Hosts):
            return encode(message)
        if (known := self._tables.get(id(message))) is None:
            known = self._tables[id(message)] = message, encode(message)
            while len(self._tables) > _TABLES:
                del self._tables[next(iter(self._tables))]
        return known[1]

    def _note(self, record: e.Record) -> None:
        """Leave notes for a successor on another machine."""
        spent, at = record.more.get("spent"), time.time()
        news = spent is not None or self.notes.recorded.get(record.event, 0) < record.epoch
        if self._leader is None or not news:
            return
        recorded = {**self.notes.recorded, record.event: record.epoch}
        if spent is None:
            spent, at = self.notes.spent, self.notes.at
        self.notes = Notes(recorded, self._failed_before or 0, spent, at)
        self._leader.renewer.note(self._lease.term, self.notes)

    def _fail(self, error: Exception) -> None:
        """An error of this controller's own: a successor goes on from what the agents know, a few times."""
        if self._done.done():
            return
        if self._failed_before is not None and self._failed_before + 1 >= FAILURES:
            log.critical("this controller fails as well", exc_info=error)
            try:
                effects = self.machine.handle(e.Failed(repr(error)), self.clock.now, time.monotonic())
            except Exception:
                log.critical("nor can it end the job as it should", exc_info=True)
                effects = self._bare_end()
            self._agree(effects)
        else:
            self._done.set_exception(error)

    def _bare_end(self) -> list[e.Effect]:
        """What ends the job where the machine itself has failed of that: all agents are told, and no more."""
        told = [e.Send(peer, m.Shutdown(code=1)) for peer in self.machine.cluster.peers]
        said = "ftrun: the job stops: its controller fails, see above"
        return [e.PrintConsole(said, "ERROR"), *told, e.End(1)]

    # -- connections ---------------------------------------------------------------------------

    async def _accept(self, connection: Connection) -> None:
        """A connection. Only what is wrong with the connection ends it; other errors end this process."""
        try:
            await self._admit(connection)
        except asyncio.CancelledError:
            pass  # this controller ends
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        except (ConnectionError, TimeoutError):
            pass  # it left; it does not greet
        except Exception as error:
            self._fail(error)
        finally:
            connection.close()

    async def _admit(self, connection: Connection) -> None:
        """Shake hands, hear who it is, and serve it until it leaves, unless another is to speak for it."""
        calls: m.RouteRequest | None = None
        try:
            self._arrive(1)
            try:
                channel = await AsyncChannel.accept(connection, self._secret, _CLIENTS)
                self._handle(e.Admitted())
                hello = await channel.recv()
                if isinstance(hello, m.RouteRequest):
                    if there := await self._tree.place(hello):
                        return await channel.send(m.UseRelay(there))
                    calls = hello
                    channel.post(m.UseRelay(""))
                    async with asyncio.timeout(handshake.PATIENCE):  # it has somebody's place
                        hello = await channel.recv()
            finally:
                self._arrive(-1)
            if not isinstance(hello, m.AgentHello | m.CtlHello):
                raise ProtocolError(f"{channel.peer} does not greet, but sends {type(hello).__name__}")
            await self._serve_client(channel, hello, calls)
        finally:
            if calls is not None:
                self._tree.leaves()

    async def _serve_client(
        self, channel: Client, hello: m.AgentHello | m.CtlHello, calls: m.RouteRequest | None
    ) -> None:
        says, peer = _MAY_SAY[type(hello)], self._enter(channel)
        branch: Branch | None = None

        def received(message: Said | Other | Bundle) -> None:
            if isinstance(message, Bundle) and branch is not None:
                self._tree.hear(branch, message)
            elif isinstance(message, Bundle | Other | m.AgentHello | m.CtlHello) or type(message) not in says:
                raise ProtocolError(f"{channel.peer} may not send {type(message).__name__}")
            else:
                self._heard(peer, message)

        try:
            if isinstance(hello, m.AgentHello):
                self._heard(peer, hello)
                if calls is not None and not channel.closing:
                    branch = self._tree.opens(channel, calls.relay)
            elif hello.job not in ("", self.job):
                await channel.recv()
                other = f"the controller there is of job {self.job}, and not of {hello.job} any more"
                return await channel.send(m.Denied(other))
            await channel.each(received)
        finally:
            if branch is not None:
                self._tree.closes(branch)
            self._left(peer)

    def _enter(self, channel: Client | Member) -> e.Peer:
        peer = next(self._numbers)
        self._channels[peer] = channel
        return peer

    def _heard(self, peer: e.Peer, message: Said) -> None:
        if isinstance(message, m.AgentHello):
            self._handle(e.Greeted(peer, message))
        else:
            self._handle(e.Received(peer, message))

    def _left(self, peer: e.Peer) -> None:
        self._channels.pop(peer, None)
        self._handle(e.Disconnected(peer))

    def _heard_together(self, messages: Sequence[tuple[e.Peer, m.FromAgent]]) -> None:
        self._handle(e.MessageBatch(messages))

    def _pulsed(self, pulses: Sequence[m.Pulse]) -> None:
        self._handle(e.Pulsed(pulses))

    def _arrive(self, change: int) -> None:
        self._arriving += change
        self._handle(e.Arriving(self._arriving))


def _line(record: e.Record, term: int) -> str:
    line = {
        "event": record.event,
        "epoch": record.epoch,
        "term": term,
        "monotonic": time.monotonic(),
        "time": time.time(),
        "roles": list(record.roles),
        "reason": record.reason,
        **record.more,
    }
    return json.dumps(line, default=msgspec.to_builtins) + "\n"


def _notes(path: Path) -> Notes:
    """What predecessors have left, on this machine."""
    found: dict[str, int] = {}
    spent, at = None, 0.0
    try:
        if not path.is_file():  # not there yet, or a device, which has no end
            return Notes()
        with path.open("rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # torn by the death of its writer
                    event = json.loads(line)
                    found[event["event"]] = event["epoch"]
                    if "spent" in event:
                        spent, at = event["spent"], event["time"]
    except OSError as error:
        log.warning("%s: %s; some events may come twice", path, error)
        return Notes()
    return Notes(found, spent=spent and msgspec.convert(spent, Spent), at=at)

"""The agent's process: sockets, workers' processes, memory, storage. It turns what happens into events for
`node.machine`, and the machine's effects into what is done; it decides nothing.

An error of its own ends the node at once: it is lost then, rather than there and of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar, assert_never

from ft_core import leadership
from ft_core.comm import nccl_environment
from ft_core.comm.rendezvous_server import Stores
from ft_core.errors import AuthenticationError, FtError, ProtocolError
from ft_core.net import interfaces
from ft_core.net.transport import TcpTransport
from ft_core.node import events as e
from ft_core.node.about import About
from ft_core.node.admission import examination
from ft_core.node.admission.child import examined
from ft_core.node.devices.watch import DeviceWatch
from ft_core.node.devices.xids import Xids
from ft_core.node.link.inquiries import Inquiries, records_of, relay
from ft_core.node.link.probe import probe
from ft_core.node.link.pulse import Loop
from ft_core.node.link.relay import Relay
from ft_core.node.link.uplink import Uplink
from ft_core.node.machine import Agent
from ft_core.node.memory.fetch import bring
from ft_core.node.memory.memory_view import MemoryView
from ft_core.node.memory.rack_loss import RackLoss
from ft_core.node.memory.ready_memory import ReadyMemory
from ft_core.node.memory.replicator import Replicator
from ft_core.node.metrics import PAGES
from ft_core.node.notices.watch import Watch
from ft_core.node.workers import departure, flight, orphans
from ft_core.node.workers.oom import OomKiller
from ft_core.node.workers.processes import WorkerPool
from ft_core.process import handed, last_line, parent, sigterm, stacks
from ft_core.process.async_writer import console, say
from ft_core.process.awake import AwakeClock
from ft_core.process.inject import Injector
from ft_core.process.lines import LOG_CONTEXT
from ft_core.process.refusals import Refusals
from ft_core.process.stalls import Stalls
from ft_core.process.tasks import Tasks
from ft_core.protocol import acceptor
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.connection import Connection
from ft_core.protocol.http import Numbering
from ft_core.protocol.http_server import Server
from ft_core.protocol.sockets import join_address, listen, own_host, reserve, split_address
from ft_core.settings import SAVED, Settings, read_id, unique
from ft_core.state import durable
from ft_core.state.manifest import Segment
from ft_core.state.memory import Word
from ft_core.state.store import NodeStore, give_up
from ft_core.worker.console import Console
from ft_core.worker.logs import Tee, players

log = logging.getLogger(__name__)
T = TypeVar("T")

_LAST_OUTPUT = 5.0
"""Seconds that the console has to take what workers have printed last."""
LAST_WORD = 2.0
"""Seconds that it has to take what this agent itself has to say."""
_STACKS = 10.0
"""Seconds to write down where a worker is, before it is ended all the same: storage may hang as well."""
_CONNECTIONS = 5.0
"""Seconds that the threads of the transport have to end: one may be in a call that takes longer."""
_LEFT_BEHIND = 10.0
"""Seconds that what workers had started has to end."""
PATIENCE = 0.25
"""Which part of the limit of silence an agent waits for the controller's word through another agent."""
_PORTS = 64
"""Ports that are tried for metrics."""
_END = 15.0
"""Seconds in which this process ends, whatever its threads wait for."""


class NodeShell:
    """The process of one node's agent."""

    def __init__(
        self,
        settings: Settings,
        secret: bytes,
        job_dir: Path,
        node: str,
        domain: str,
        node_rank: int,
        loop: Loop,
    ) -> None:
        """`loop` is told when this agent's event loop goes round."""
        self.speaks = True
        """Whether what happens to this node is said here; else the controller has the same console."""
        self.settings, self.job_dir, self.node, self.domain = settings, job_dir, node, domain or node
        self.secret = secret
        self._log_dir = job_dir / "logs" / f"{node}-{os.getpid()}"
        self.store = NodeStore()
        self._memory = OomKiller()
        self._loop, self._inquiries = loop, Inquiries(node, self.store, loop.stalled)
        self._leadership = leadership.at(settings.meeting, self.secret, settings.size[0])
        host = self._host = own_host(self._leadership.near)
        data = interfaces.choose(settings.interfaces, host, interfaces.here())
        log.debug("node %s: state is served on %s", node, ", ".join(map(str, data)))
        self.transport = TcpTransport(
            self.store, self.secret, host=[each.address for each in data], answer=self._inquiries.answer
        )
        injector = Injector(job_dir, settings.inject)
        self.ready = ReadyMemory(self.store, self.transport, settings.nproc_per_node)
        self.replicator = Replicator(self.store, self.transport, injector)
        self.replicator.use(settings)
        self._rack_loss = RackLoss(node)
        self.stores = Stores(host, self.secret)
        self._master = reserve(host)
        self._workers_socket = f"unix:\0ft-{uuid.uuid4().hex}"
        self.pool = self._make_pool()
        about = About(
            node=node,
            domain=self.domain,
            node_rank=node_rank,
            pid=os.getpid(),
            data=self.transport.address,
            store=self.stores.address,
            master=join_address(host, self._master.getsockname()[1]),
            job_dir=str(job_dir),
            environment={
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                **nccl_environment.completed(os.environ),
            },
        )
        xids = Xids()
        self.machine = Agent(about, settings, MemoryView(self.store, self.pool, self.replicator, xids))
        self._watch, self._devices = Watch(node, self._handle), DeviceWatch(xids, self._handle)
        LOG_CONTEXT.about = lambda: {"node": node, "epoch": self.machine.epochs.epoch}
        self._refusals = Refusals(lambda reason: log.warning("node %s refused: %s", self.node, reason))
        self._events: deque[e.Event] = deque()
        self._handling = False
        self._fetching: Counter[int] = Counter()
        """Roles whose state is being brought here, and how often: an epoch that is over may still do so."""
        self._examinations = 0
        """Checks of this node that were begun."""
        self._saving = 0
        """Parts of the job's last version that are being written."""
        roles = settings.nproc_per_node
        self._storage = ThreadPoolExecutor(2 * roles + 1, "ft-storage")
        """A save and a load for each role, and a list."""
        self._network = ThreadPoolExecutor(4 * roles + 8, "ft-network")
        """A copy and a fetch for each role and another that it has adopted; questions and names."""
        self._done: asyncio.Future[int | None]
        """Exit code; None: begin anew, as a spare."""
        self._tasks: Tasks
        self._tee: Tee
        self._clock: AwakeClock
        self._relay: Relay
        self._relaying: asyncio.Task[None]
        self._uplink: Uplink

    def _make_pool(self) -> WorkerPool:
        return WorkerPool(
            socket=self._workers_socket,
            secret=self.secret,
            job_dir=self.job_dir,
            log_dir=self._log_dir,
            command=self.settings.command,
            redirects=self.settings.redirects | self.settings.tee,
            json=self.settings.log_format == "json",
            ended=self._worker_ended,
            gone=self._worker_gone,
        )

    async def run(self) -> int:
        """Serve until the machine ends. Returns its exit code. Raises what this process cannot cope with."""
        self._open()
        workers = self._tasks.spawn(
            acceptor.serve(
                listen(self._workers_socket), self.secret, f"node {self.node}", self._accept_worker
            )
        )
        stores = self._tasks.spawn(self.stores.serve(self._fail))
        json = self.settings.log_format == "json"
        prefix = self.node if self.settings.log_prefix else ""
        shown = self.settings.local_ranks, self.settings.nproc_per_node
        about = Console(self._log_dir.parent, prefix, json, *shown)
        self._tee = Tee(self.settings.tee, about, self._fail)
        self.pool.open(self._tee)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._handle, e.Terminate())
        self._begin()
        http = self._serve_http()
        code = await self._done
        if http is not None:
            http.close()
        sigterm.ignore()
        if self.machine.drained and self.speaks:  # else the controller is still needed here
            await self._watch.agree()
        workers.cancel()
        stores.cancel()
        if code is None:
            await self._begin_again()
        # Threads that still wait for a peer, or for storage, must not hold up the end of a job that is over.
        watchdog = threading.Timer(_END, os._exit, [code])
        watchdog.daemon = True
        watchdog.start()
        await self._close()
        if self._saving:  # its storage hangs, and the job has waited for it as long as it may
            os._exit(code)
        return code

    def _open(self) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._tasks = Tasks(self._fail)
        asyncio.get_running_loop().set_default_executor(self._network)
        self._clock = AwakeClock(2 * self.settings.heartbeat)
        self._inquiries.open(self._handle)
        who, settings, refused = f"the relay of node {self.node}", self.settings, self._refusals.add
        self._relay = Relay(self._host, self.secret, who, refused, self._fail)
        self._uplink = Uplink(
            *(self.node, self.secret, "" if settings.leadership else read_id(self.job_dir)),
            *(self._leadership, self._relay, self._loop),
            settings.silence_limit * PATIENCE,
            handle=self._handle,
            refused=refused,
            failed=self._fail,
        )

    def _serve_http(self) -> Server | None:
        """Where there are several agents on a machine, at the first port that is free from that on."""
        if not self.settings.metrics:
            return None
        host, first = split_address(self.settings.metrics)
        numbers = Numbering(asyncio.get_running_loop(), self.machine.numbers)
        for port in range(first, min(first + _PORTS, 1 << 16)):
            try:
                server = Server(join_address(host, port), numbers, PAGES)
            except OSError as error:
                why = error
            else:
                with contextlib.suppress(OSError):  # workers make it as well, and may be later
                    self._log_dir.mkdir(parents=True, exist_ok=True)
                server.start(self._log_dir)
                return server
        log.warning("node %s: no metrics: --ft-metrics-port %s: %s", self.node, self.settings.metrics, why)
        return None

    def _begin(self) -> None:
        self._handle(e.Begin())
        self._relaying = self._tasks.spawn(self._relay.serve())
        self._tasks.spawn(self._uplink.serve())
        self._tasks.spawn(self._tick())
        self._tasks.spawn(self.ready.serve())
        self._tasks.spawn(self._watch.serve(self.settings.notices, self.settings.size[0]))
        self._tasks.spawn(self._devices.serve(self.settings.nproc_per_node))

    def _fail(self, error: Exception) -> None:
        """An error of this agent's own: its node is lost, rather than there and of no use."""
        if not self._done.done():
            self._done.set_exception(error)

    # -- events --------------------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        """One after the other, also those that come of what another's effects have done."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self.machine.handle(self._events.popleft(), self._clock.tick()):
                    self._do(effect)
        finally:
            self._handling = False

    async def _tick(self) -> None:
        # An agent that is held up looks dead from outside: leave a trace of what held it up.
        stalls = Stalls(self._log_dir / "stalls.txt", 2 * self.settings.heartbeat)
        try:
            while True:
                stalls.beat()
                self._loop.turned()
                self._devices.look()
                self._handle(e.Tick())
                if parent.gone():
                    self._handle(e.LauncherGone())
                await asyncio.sleep(self.settings.heartbeat)
        finally:
            stalls.close()

    async def _receive(self, channel: AsyncChannel[T]) -> T | None:
        """The next message; None at the end of the connection."""
        try:
            return await channel.recv()
        except ConnectionError as error:
            log.debug("node %s: a connection ended (%s)", self.node, error)
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        return None

    async def _accept_worker(self, connection: Connection) -> None:
        """A connection. Only what is wrong with the connection ends it; other errors end this process."""
        try:
            channel = await AsyncChannel.accept(connection, self.secret, m.FROM_WORKER)
            hello = await self._receive(channel)
            if not isinstance(hello, m.WorkerHello) or not self.pool.connect(hello.worker, channel):
                return  # it has died since
            self._handle(e.WorkerReady(hello.worker))
            while (message := await self._receive(channel)) is not None:
                self.pool.heard(hello.worker)
                self._handle(e.FromWorker(hello.worker, message))
        except AuthenticationError as error:
            self._refusals.add(str(error))
        except asyncio.CancelledError:
            pass  # this agent ends
        except Exception as error:
            self._fail(error)
        finally:
            connection.close()

    def _worker_ended(self, number: int, pid: int, code: int, version: int) -> None:
        out_of_memory = code == -signal.SIGKILL and self._memory.ended(pid)
        self._devices.look()  # first, so that it is known where the role had better not go on
        self._handle(e.WorkerEnded(number, code, version, out_of_memory))
        self._tasks.spawn(self._in_thread(orphans.end_of, pid))

    def _worker_gone(self, number: int) -> None:
        self._handle(e.WorkerGone(number))
        self._tasks.spawn(self._in_thread(orphans.end))

    async def _in_thread(self, call: Callable[..., object], *arguments: object) -> None:
        await asyncio.to_thread(call, *arguments)  # reads of every process of the machine

    # -- effects -------------------------------------------------------------------------------

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.ToController(message):
                self._uplink.post(message)
            case e.Report():
                self._uplink.post(self.machine.epochs.report())
            case e.ToWorker(number, order):
                self.pool.post(number, order)
            case e.Start(number, device):
                self._handle(e.Forked(number, self.pool.start(number, device)))
            case e.Kill(number):
                self.pool.signal(number, signal.SIGKILL)
            case e.Signal(number, even_so):
                if (pid := self.pool.pid(number)) is not None and departure.pass_on(pid, even_so):
                    self._handle(e.Signalled(number))
            case e.ShowRest(role):
                self._tee.succeed(players(self._log_dir.parent, role))
            case e.SetApart(number, apart):
                self.pool.set_apart(number, apart)
            case e.Commit(number, version):
                if (control := self.pool.control(number)) is not None:
                    control[Word.COMMITTED] = version
            case e.BeginEpoch(epoch):
                self._begin_epoch(epoch)
                self.replicator.cancel()
            case e.UsePlan(plan):
                self._begin_epoch(plan.epoch)
                replicas = self.store.replicas
                replicas.every = max(replicas.every, self.settings.period(plan.every))
                self.replicator.begin(plan)
                self.ready.use(self.node, plan)
                self._tasks.spawn(self._rack_loss.tell(plan, self.settings))
            case e.UseSettings(settings):
                self.settings = settings
                self.replicator.use(settings)
            case e.DropAfter(version):
                self.store.drop_after(version)
            case e.KeepOnly(roles, adopted):
                self.store.keep_only(roles, adopted)
                self.pool.forget_ended()
            case e.InvalidateCopy(role, slot, of_another):
                self.store.memory(role, of_another).strike(slot)
            case e.Reserve():
                self._reserve(effect)
            case e.Replicate():
                self._tasks.spawn(self._replicate(effect))
            case e.FetchState():
                self._tasks.spawn(self._bring(effect))
            case e.WriteDurable():
                self._tasks.spawn(self._write_durable(effect))
            case e.WriteVersion():
                self._tasks.spawn(self._write_version(effect))
            case e.LookForDurable(number):
                self._tasks.spawn(self._list_durable(number))
            case e.ReadFlight():
                self._tasks.spawn(self._read_flight(effect))
            case e.Probe():
                self._tasks.spawn(self._probe(effect))
            case e.WriteStacks():
                self._tasks.spawn(self._write_stacks(effect))
            case e.AskPeer():
                self._tasks.spawn(self._ask_peer(effect))
            case e.AskRecords():
                self._tasks.spawn(self._ask_records(effect))
            case e.AnswerPeer(number, answer):
                self._inquiries.answered(number, answer)
            case e.ExamineNode():
                self._tasks.spawn(self._examine())
            case e.KillNode():
                self._kill_node()
            case e.BecomeSpare():
                self._end(None)
            case e.Say(text):
                if self.speaks:
                    say(text)
            case e.End(code):
                self._end(code)
            case _:
                assert_never(effect)

    def _begin_epoch(self, epoch: int) -> None:
        self.store.replicas.epoch = epoch
        self.stores.begin(epoch)

    def _end(self, code: int | None) -> None:
        if not self._done.done():
            self._done.set_result(code)

    def _kill_node(self) -> None:
        if parent.gone():
            console().flush(LAST_WORD)
        kill_node()

    def _reserve(self, asked: e.Reserve) -> None:
        request = asked.request
        segments = [Segment.of(layout) for layout in request.segments]
        memory = self.store.memory(request.role, asked.adopted)
        buffer = memory.allocate(request.slot, segments, asked.again)
        self.pool.post(asked.worker, m.Allocated(request.id, buffer.memory.address))

    async def _replicate(self, order: e.Replicate) -> None:
        failed = ""
        control = self.pool.control(order.worker)
        step = control[Word.STEP_NS] / 1e9 if control else 0.0
        turn = self.replicator.turn(order.role, step, self.pool.traffic)
        what = order.role, order.version, order.epoch
        try:
            await asyncio.to_thread(self.replicator.replicate, *what, order.ring, turn)
        except FtError as error:
            failed = str(error)
        self._handle(e.Replicated(order, failed))

    async def _bring(self, order: e.FetchState) -> None:
        plan, copies, failed = order.plan, [], ""
        version = plan.version
        assert version is not None
        self._fetching[order.role] += 1
        try:
            for role in order.held:
                began, took = time.monotonic(), 0.0
                memory = self.store.memory(role, adopted=role != order.role)
                if (found := memory.find(version)) is None:
                    about = role, plan, self.store, self.transport, self.settings
                    if plan.origin == "durable":
                        made = [await self._on_storage(bring, *about)]
                    else:
                        made = [await asyncio.to_thread(bring, *about)]
                    took = time.monotonic() - began
                    epochs = self.machine.epochs
                    if epochs.plan_epoch != plan.epoch or epochs.epoch != plan.epoch:
                        give_up(made)
                        return
                    found = memory.take(made[0]), made[0]
                slot, buffer = found
                layouts = [segment.layout for segment in buffer.segments]
                copies.append(m.CopyHere(role, slot, buffer.memory.address, layouts, took))
        except FtError as error:
            failed = str(error)
        finally:
            self._fetching -= Counter((order.role,))
        self._handle(e.StateFetched(order, tuple(copies), failed))

    async def _write_durable(self, order: e.WriteDurable) -> None:
        roles, failed = [], ""
        where = self.settings.durable_dir, self.settings.world_size, self.store
        what = order.role, order.version, order.plan, order.replicated
        try:
            roles = await self._on_storage(durable.save, *where, *what)
        except (OSError, FtError) as error:
            failed = str(error)
        self._handle(e.DurableDone(order.role, order.plan.epoch, order.version, tuple(roles), failed))

    @property
    def _durable_dir(self) -> str:
        """Where checkpoints are; where nobody has said, for the one that a job leaves which ends."""
        return self.settings.durable_dir or str(self.job_dir / SAVED)

    async def _write_version(self, order: e.WriteVersion) -> None:
        """The part of a role, and before that what another node has of it."""
        failed, first = "", order.held[0]
        self._saving += 1
        try:
            if not self.settings.durable_dir and not (self.job_dir / "events.jsonl").exists():
                raise FtError(f"{self.job_dir} is not the controller's: give a --ft-durable-dir")
            for role in order.held:
                memory = self.store.memory(role, adopted=role != first)
                if memory.find(order.version) is not None:
                    continue
                if role not in order.plan.sources:
                    raise FtError(f"version {order.version} of role {role} is no longer in memory")
                about = role, order.plan, self.store, self.transport, self.settings
                made = [await asyncio.to_thread(bring, *about)]
                if self.machine.epochs.epoch != order.plan.epoch:  # the slots are a worker's again
                    give_up(made)
                    raise FtError(f"epoch {order.plan.epoch} is over")
                memory.take(made[0])
            where = self._durable_dir, self.settings.world_size, self.store
            what = first, order.version, order.plan, order.replicated
            await self._on_storage(durable.save, *where, *what)
        except (OSError, FtError) as error:
            failed = str(error)
        self._saving -= 1
        self._handle(e.VersionWritten(order, failed))

    async def _list_durable(self, number: int) -> None:
        """The controller needs to know which durable checkpoints can be read here."""
        names, others, failed = [], [], ""
        where = self._durable_dir, self.settings.world_size
        try:
            names = await self._on_storage(durable.complete, *where)
            others = await self._on_storage(durable.other_sizes, *where)
        except OSError as error:
            failed = str(error)
        self._handle(e.DurableListed(number, tuple(names), failed, tuple(others)))

    async def _read_flight(self, asked: e.ReadFlight) -> None:
        about = asked, self.pool.recorded(asked.playing), frozenset(self._fetching)
        self._handle(e.FlightRead(await asyncio.to_thread(flight.answer, *about)))

    async def _probe(self, order: e.Probe) -> None:
        reach = await probe(order.nodes, self.secret, self.settings.silence_limit)
        self._handle(e.Probed(order.round, reach))

    async def _write_stacks(self, order: e.WriteStacks) -> None:
        pid, log_dir = self.pool.pid(order.worker), self.pool.log_dir(order.worker)
        if pid is not None and log_dir is not None:
            target = self.job_dir / "hangs" / f"role-{order.role}-{pid}.txt"
            try:
                async with asyncio.timeout(_STACKS):
                    said = await asyncio.to_thread(stacks.write, pid, log_dir, target, orphans.child)
            except TimeoutError:
                said = f"where it is cannot be written to {target} within {_STACKS:g} s"
            log.warning("node %s: role %d, worker %d: %s", self.node, order.role, pid, said)
        self._handle(e.Examined(order.worker, order.end))

    async def _ask_peer(self, asked: e.AskPeer) -> None:
        self.pool.post(asked.worker, await asyncio.to_thread(relay, asked, self.transport))

    async def _examine(self) -> None:
        """Check this node."""
        settings, environment = self.settings, {**os.environ, **self.machine.about.environment}
        subject = examination.Subject(self._host, settings.nproc_per_node, settings.world_size, environment)
        self._examinations += 1
        path = self._log_dir / f"check-{self._examinations}.jsonl"
        try:
            await asyncio.to_thread(self._log_dir.mkdir, parents=True, exist_ok=True)  # storage may hang
            found = await examined(lambda: self.pool.aside(examination.main, str(path), subject), path)
        except (OSError, EOFError) as error:  # the fork server is ending
            found = examination.impossible("start", str(error))
        about = found.times, found.hardware
        self._handle(e.NodeExamined(tuple(found.checks), *about, tuple(found.findings)))

    async def _ask_records(self, asked: e.AskRecords) -> None:
        self._handle(await asyncio.to_thread(records_of, asked, self.transport))

    async def _on_storage(self, call: Callable[..., T], *arguments: object) -> T:
        """Call something in one of the threads that may wait for storage: there are others for the network
        and for names."""
        return await asyncio.get_running_loop().run_in_executor(self._storage, call, *arguments)

    # -- the end -------------------------------------------------------------------------------

    async def _close(self) -> None:
        """End what is left, and have all of it said."""
        self.pool.close()
        await self._leave_controller()
        self._inquiries.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECTIONS):
                await asyncio.to_thread(self.transport.close)
        deadline = time.monotonic() + _LEFT_BEHIND
        while True:
            await asyncio.sleep(0.02)  # for the kernel to hand over what killed workers had started
            if await asyncio.to_thread(orphans.end) or time.monotonic() > deadline:
                break
        if not await self._tee.close(_LAST_OUTPUT):
            log.error(
                "node %s: the console, or storage, does not take what workers have printed last: see %s",
                *(self.node, self._log_dir),
            )
        await asyncio.to_thread(console().flush, LAST_WORD)

    async def _leave_controller(self) -> None:
        """Leave the controller; those for which this agent speaks go elsewhere."""
        self._uplink.ends()
        self._relaying.cancel()
        await self._relay.close()

    async def _begin_again(self) -> NoReturn:
        """Become another agent of this machine: all that is held here is of another past of the job.

        The same process, so that whoever has started it need not know.
        """
        if not await asyncio.to_thread(orphans.end_all, _LEFT_BEHIND):
            log.error(
                "node %s: processes that it had started do not end, so it does not come back", self.node
            )
            sys.exit(1)
        await self._tee.close(_LAST_OUTPUT)
        await asyncio.to_thread(console().flush, LAST_WORD)
        about = [parent.argument(), last_line.argument(), handed.argument()]
        about += ["--job-dir", str(self.job_dir)]
        about += ["--beside-controller"] * (not self.speaks)
        about += ["--domain", self.domain, "--node", unique(self.node)]
        if temporary := temporary_directory():
            about += ["--temporary", temporary]
        os.execv(sys.executable, [sys.executable, "-m", "ft_core.node", *about])


def temporary_directory() -> str | None:
    """The directory for this process's sockets, where whoever has started it has given one."""
    return multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]


def kill_node() -> NoReturn:
    """End this node at once; if `ftrun` is gone, who would see to that, leave nothing behind."""
    if parent.gone() and (temporary := temporary_directory()):
        shutil.rmtree(temporary, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("unreachable")

"""The agent: one process per node. Starts workers, owns the snapshot memory, moves replicas, reports.

It acts on the controller's epochs (abort, plan) and on its workers' messages; it decides nothing
about the job. It outlives its workers, and it works on while the controller is away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar, assert_never

import msgspec

from ft_core.comm.rendezvous import Stores
from ft_core.errors import AuthenticationError, FtError, ProtocolError
from ft_core.net.transport import TcpTransport
from ft_core.node import orphans
from ft_core.node.departure import Departure
from ft_core.node.fetch import bring
from ft_core.node.inquiries import Inquiries
from ft_core.node.replicator import Replicator
from ft_core.node.reports import Reports, Said
from ft_core.node.workers import Exit, Worker, WorkerPool
from ft_core.process import collector, parent, sigterm
from ft_core.process.awake import AwakeClock
from ft_core.process.descriptors import check_limit
from ft_core.process.inject import ENV as INJECT_ENV
from ft_core.process.inject import Injector
from ft_core.process.outlet import console, log_to_console
from ft_core.process.refusals import Refusals
from ft_core.process.stalls import Stalls
from ft_core.process.tasks import Tasks
from ft_core.protocol import door
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.messages import (
    FROM_CONTROLLER,
    FROM_WORKER,
    Abort,
    Allocate,
    Allocated,
    AskProgress,
    AskStartupEntries,
    Assign,
    BringSettings,
    CopyHere,
    CorruptCopy,
    FromWorker,
    Hold,
    PlanBegins,
    Progress,
    Quiesced,
    Refused,
    Registered,
    Release,
    Restore,
    ScriptFailed,
    SendCounts,
    SendIssued,
    SettingsTaken,
    Staged,
    StartupEntries,
    ToAgent,
    ToWorker,
    Welcome,
    WorkerCompleted,
    WorkerCounts,
    WorkerFinished,
    WorkerHeld,
    WorkerHello,
    WorkerIssued,
    WorkerPlan,
    WorkerReopened,
    WorkerRestored,
    WorkerStepped,
    WorkerSuspects,
    WorkerTrained,
    WorkerUnprotected,
)
from ft_core.protocol.messages import Exit as EndScript
from ft_core.protocol.provisional import from_controller, to_controller
from ft_core.protocol.sockets import listen, reserve
from ft_core.protocol.transfers import Found, Question
from ft_core.settings import Settings, read_secret, unique
from ft_core.state import durable
from ft_core.state.manifest import Segment
from ft_core.state.memory import Word
from ft_core.state.store import NodeStore
from ft_core.worker.logs import Tee, players

log = logging.getLogger(__name__)
Message = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")

_RECONNECT = 0.05
_WARN_EVERY = 60.0
_ATTEMPT = 5.0
"""Seconds that one attempt to reach the controller may take."""
_MISSED = 10.0
"""Seconds without a controller, awake and trying, after which this node says so."""
_ABANDONED = 600.0
"""The same after which it leaves if nobody trains here: the job is over, or lost with its controller."""
_FAREWELL = 10.0
_LAST_OUTPUT = 5.0
"""Seconds that the console has to take what workers have printed last."""
_LAST_WORD = 2.0
"""Seconds that it has to take what this agent itself has to say."""
_TRAINED = 256
"""Steps that may pass while the controller is restarted, without the ledger missing one."""


class Agent:
    """State and message handlers of one node."""

    def __init__(self, settings: Settings, job_dir: Path, node: str, domain: str, node_rank: int) -> None:
        self.settings, self.job_dir, self.node = settings, job_dir, node
        self.domain = domain or node
        self.node_rank = node_rank
        self.secret = read_secret(job_dir)
        self._log_dir = job_dir / "logs" / f"{node}-{os.getpid()}"
        self.store = NodeStore()
        self.plan: Message = {}
        self.epoch = 0
        self._host = _own_host(settings.controller)
        self.transport = TcpTransport(self.store, self.secret, host=self._host, answer=self._answer)
        self._injector = Injector(job_dir, settings.inject)
        self.replicator = Replicator(self.store, self.transport, settings.replicas, self._injector)
        self._controller: AsyncChannel[ToAgent] | None = None
        self.stores = Stores(self._host, self.secret)
        self._master = reserve(self._host)
        self._inquiries: Inquiries | None = None
        self._refusals = Refusals(lambda reason: log.warning("node %s refused: %s", self.node, reason))
        self._reports = Reports(self)
        self._said = Said()
        self.configured: Message | None = None
        """Settings that the script has brought; `settings` has them in it."""
        self._asking: dict[int, Message] = {}
        """Worker -> the settings that it brings and waits for."""
        self._trained: deque[Message] = deque(maxlen=_TRAINED)
        """The newest steps' samples, for the ledger."""
        self.reported = 0
        """The newest epoch before which no worker here is inside a step any more."""
        self._writing: dict[int, int] = {}
        """Role -> the version of it that is being written to storage."""
        self._given_up = False
        roles = settings.nproc_per_node
        self._storage = ThreadPoolExecutor(2 * roles + 1, "ft-storage")
        """A save and a load for each role, and a list."""
        self._network = ThreadPoolExecutor(4 * roles + 8, "ft-network")
        """A copy and a fetch for each role and another that it has adopted; questions and names."""
        self._done: asyncio.Future[int] | None = None
        self._tasks: Tasks
        self._served = False
        """Whether the job's controller has ever been met."""
        self._warn_at = 0.0
        self.pool: WorkerPool

    async def run(self) -> int:
        """Serve until the controller ends the job. Returns its exit code. Raises what this process cannot
        cope with."""
        self._done = asyncio.get_running_loop().create_future()
        self._tasks = Tasks(self._fail)
        asyncio.get_running_loop().set_default_executor(self._network)
        address = f"unix:\0ft-{uuid.uuid4().hex}"
        who = f"node {self.node}"
        workers = self._tasks.spawn(door.serve(listen(address), who, self._accept_worker))
        stores = self._tasks.spawn(self.stores.serve(self._fail))
        prefix = f"[{self.node}]: " if self.settings.log_prefix else ""
        self._tee = Tee(self.settings.tee, prefix, self._fail)
        self.pool = WorkerPool(
            socket=address,
            secret=self.secret,
            job_dir=self.job_dir,
            log_dir=self._log_dir,
            command=self.settings.command,
            redirects=self.settings.redirects | self.settings.tee,
            tee=self._tee,
            on_exit=self._worker_ended,
        )
        self._departure = Departure(self.pool, self._post, self._leave)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._departure.begin)
        self._inquiries = Inquiries(self.node, self.store, self.pool, self.transport)
        for device in range(self.settings.nproc_per_node):
            self.pool.start(device)
        self.pool.start(-1)  # the standby that takes over from a worker that crashes here
        self._tasks.spawn(self._serve_controller())
        self._tasks.spawn(self._heartbeat())
        code = await self._done
        sigterm.ignore()
        workers.cancel()
        stores.cancel()
        if self._given_up:
            await self._begin_again()
        # Threads that still wait for a peer, or for storage, must not hold up the end of a job that is over.
        watchdog = threading.Timer(1.5 * _FAREWELL, os._exit, [code])
        watchdog.daemon = True
        watchdog.start()
        await self._farewell()
        return code

    def roles_here(self) -> list[int]:
        """Roles that the plan places on this node."""
        return [int(role) for role, node in self.plan.get("roles", {}).items() if node == self.node]

    @property
    def master(self) -> str:
        """Where a script may listen, should role 0 be here (MASTER_ADDR and MASTER_PORT)."""
        return f"{self._host}:{self._master.getsockname()[1]}"

    # -- controller ----------------------------------------------------------------------------

    async def _serve_controller(self) -> None:
        clock, met, of_use = AwakeClock(_ATTEMPT), 0.0, 0.0
        while True:
            if (channel := await self._connect()) is not None:
                self._controller, self._served = channel, True
                about = {**self._reports.identity(), **self._reports.holdings()}
                # A controller that died may not have answered those, and not have written down these.
                said = [*self._said, *self._asking.values(), *self._trained]
                self._post({"type": "hello", "kind": "agent", **about, "said": said})
                self._departure.announce()
                while (message := await self._receive(channel)) is not None:
                    self._on_controller(from_controller(message))
                # Training goes on without a controller; it rebuilds its view when it is back.
                self._controller = None
                met = of_use = clock.tick()
            else:
                of_use = clock.now if self.pool.playing() else of_use
                self._alone(clock.tick() - met, clock.now - of_use)
            await asyncio.sleep(_RECONNECT)

    def _alone(self, seconds: float, of_no_use: float) -> None:
        """No controller has been met for so long, and nobody has trained here either.

        The end of a job is told to those who are there: who comes, or goes on, after it would wait for ever.
        """
        address = self.settings.controller
        if of_no_use > _ABANDONED:
            log.error(
                "node %s leaves: nobody trains here, and for %.0f s there was no controller at %s: the job "
                "is over, or its controller's machine is lost",
                *(self.node, of_no_use, address),
            )
            self._end(1)
        elif seconds > _MISSED:
            self._warn(f"no controller answers at {address}")

    async def _connect(self) -> AsyncChannel[ToAgent] | None:
        """The controller, if it is there."""
        address = self.settings.controller
        try:
            return await AsyncChannel.connect(address, self.secret, FROM_CONTROLLER)
        except (AuthenticationError, ProtocolError) as error:
            if isinstance(error, AuthenticationError) and not self._served:
                log.error("node %s leaves: %s", self.node, error)
                self._end(2)
            else:
                self._warn(f"whoever answers at {address} is not this job's controller: {error}")
        except OSError as error:
            log.debug("node %s: no controller at %s (%s)", self.node, address, error)
        return None

    async def _receive(self, channel: AsyncChannel[R]) -> R | None:
        """The next message; None at the end of the connection."""
        try:
            return await channel.recv()
        except ConnectionError as error:
            log.debug("node %s: a connection ended (%s)", self.node, error)
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        return None

    def _warn(self, problem: str) -> None:
        """Once a minute at most: what is tried again all the time fails all the time."""
        if time.monotonic() > self._warn_at:
            self._warn_at = time.monotonic() + _WARN_EVERY
            log.warning("node %s: %s; trying again", self.node, problem)

    def _end(self, code: int) -> None:
        """This agent is done."""
        assert self._done is not None
        if not self._done.done():
            self._done.set_result(code)

    def _on_controller(self, message: Message) -> None:
        kind = message["type"]
        if kind == "abort":
            self._abort(message["epoch"])
        elif kind == "plan":
            self._apply(message)
        elif kind == "nodes" and message["id"] == self.plan.get("id"):
            self._know(message["nodes"])
        elif kind == "kill":
            self._kill(message.get("role"))
        elif kind == "state":
            self._post({"type": "state", **self._reports.state_of(message["role"])})
        elif kind == "durable":
            self._tasks.spawn(self._list_durable(message["id"]))
        elif kind == "beat":
            self._post(self._reports.heartbeat())
        elif kind in ("release", "counts", "hold", "issued"):
            about = {key: value for key, value in message.items() if key != "type"}
            passed: ToWorker = {
                "release": Release,
                "counts": SendCounts,
                "hold": Hold,
                "issued": SendIssued,
            }[kind](**about)
            for worker in self.pool.playing():
                worker.post(passed)
        elif kind == "prepare" and message["epoch"] == self.plan.get("epoch"):
            for role in message["roles"]:
                if self.pool.of_role(role) is None:
                    self._assign(role, message["worker"])
                elif (said := self._said.get("prepared", role)) is not None:
                    self._post(said)  # to another controller, which has asked before
        elif kind == "tell":
            self._post(self.plan)
        elif kind == "given_up":
            log.warning(
                "node %s was not heard of for too long, and the job has gone on without it: its workers end, "
                "and it joins again as a spare",
                self.node,
            )
            assert self._done is not None
            self._given_up = not self._done.done()
            self._end(0)
        elif kind == "withdraw":
            self._withdraw(message["roles"])
        elif kind == "configured":
            self._configure(message["settings"])
        elif kind == "answer":
            self._answered(message)
        elif kind == "shutdown":
            self._end(int(message["code"]))

    def _configure(self, values: Message) -> None:
        """Use the settings that the script brings, from now on. The controller has checked them."""
        self.configured, self.settings = values, dataclasses.replace(self.settings, **values)
        self.replicator.replicas = self.settings.replicas
        self._post({"type": "configured", "configured": values})

    def _answered(self, message: Message) -> None:
        """The controller has taken the settings that a worker here brings, or says why not."""
        self._asking.pop(message["worker"], None)
        if (worker := self.pool.workers.get(message["worker"])) is not None:
            error = message["error"]
            worker.post(Refused(message["id"], error) if error else SettingsTaken(message["id"]))

    async def _heartbeat(self) -> None:
        # An agent that is held up looks dead from outside: leave a trace of what held it up.
        stalls = Stalls(self._log_dir / "stalls.txt", 2 * self.settings.heartbeat)
        try:
            while True:
                stalls.beat()
                self._post(self._reports.heartbeat())
                self._departure.tell()
                if parent.gone():
                    log.error("node %s: ftrun is gone; this agent stops", self.node)
                    await asyncio.to_thread(console().flush, _LAST_WORD)
                    _stop()
                await asyncio.sleep(self.settings.heartbeat)
        finally:
            stalls.close()

    def _post(self, message: Message) -> None:
        if self._controller is not None:
            with contextlib.suppress(ConnectionError):  # the controller just died: its reader notices
                self._controller.post(to_controller(message))

    def _say(self, message: Message) -> None:
        """Post what the controller must know, whichever it is by then."""
        self._said.keep(message)
        self._post(message)

    # -- epochs --------------------------------------------------------------------------------

    def _abort(self, epoch: int) -> None:
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self.store.replicas.epoch = epoch
        self.stores.begin(epoch)
        self.replicator.cancel()
        for worker in self.pool.playing():
            worker.replicated.clear()
            worker.control[Word.COMMITTED] = -1
            worker.post(Abort(epoch))
        self._tasks.spawn(self._kill_stuck(epoch))
        self._report_if_quiet()

    def _report_if_quiet(self) -> None:
        """Once no worker here is inside a step of an older epoch, say what this node holds."""
        quiet = all(w.quiesced >= self.epoch for w in self.pool.playing())
        if quiet and self.reported < self.epoch and self.epoch != self.plan.get("epoch"):
            self.reported = self.epoch
            self._post({"type": "holdings", **self._reports.holdings()})

    async def _kill_stuck(self, epoch: int) -> None:
        await asyncio.sleep(self.settings.quiesce_timeout)
        for worker in self.pool.playing():
            if self.epoch == epoch and worker.quiesced < epoch and self.plan.get("epoch", 0) < epoch:
                log.error(
                    "node %s: role %s did not leave its step within %.0f s; its worker %d is replaced",
                    *(self.node, worker.role, self.settings.quiesce_timeout, worker.pid),
                )
                self.pool.kill(worker)

    def _apply(self, plan: Message) -> None:
        """Begin the epoch of `plan`: give roles to workers, bring their state here, let them go on."""
        if plan["epoch"] < self.epoch or plan["epoch"] == self.plan.get("epoch"):
            return
        roles, adopted = self.roles_here(), self._adopted_here()
        self.plan, self.epoch = plan, plan["epoch"]
        self.stores.begin(self.epoch)
        self.store.replicas.epoch = self.epoch
        self.replicator.begin(plan)
        version = plan["version"]
        if version is not None:
            self.store.drop_after(version)
        elif plan["started_over"] == self.epoch:
            self.store.drop_after(-1)
            self._said.keep_only([])
        self._withdraw({worker.role for worker in self.pool.playing()} - set(self.roles_here()))
        self._said.keep_only([*self.roles_here(), *self._adopted_here()])
        # A role that has moved away may still be fetched from here: its memory goes one epoch later.
        self.store.keep_only([*self.roles_here(), *roles], [*self._adopted_here(), *adopted])
        for role in self.roles_here():
            worker = self.pool.of_role(role)
            if worker is not None:
                worker.post(PlanBegins(self._worker_plan()))
            elif role in plan["newcomers"] or role not in roles:
                worker = self._assign(role)
            # Otherwise it has died since this node reported: the plan relies on it, so there will be another.
            if worker is not None:
                self._tasks.spawn(self._restore(worker, role, plan))

    def _know(self, nodes: Mapping[str, Message | None]) -> None:
        """Nodes without a role that have come, or gone (None), since the plan was made."""
        known = self.plan["nodes"]
        now = {name: about for name, about in {**known, **nodes}.items() if about is not None}
        self.plan = {**self.plan, "nodes": now}
        self.replicator.begin(self.plan)
        for gone in set(known) - set(now):
            self.transport.close_peers(known[gone]["data"])  # what is being sent there goes elsewhere

    def _withdraw(self, roles: Collection[int | None]) -> None:
        """Replace the workers of a replica group that takes no part: others may need the places."""
        for worker in self.pool.playing():
            if worker.role is not None and worker.role in roles:
                self._said.forget([worker.role])
                worker.role, worker.withdrawn = None, True
                self.pool.kill(worker)

    def _worker_plan(self) -> WorkerPlan:
        plan: WorkerPlan = self.plan["worker"]
        return plan

    def _assign(self, role: int, plan: WorkerPlan | None = None) -> Worker | None:
        """Give the role to an idle worker. `plan`: for one that takes no part yet."""
        idle = self.pool.idle()
        self._said.forget([role])
        if not idle:
            self._say({"type": "short", "epoch": self.epoch, "role": role})
            return None
        local_rank = role % self.settings.nproc_per_node
        worker = next((w for w in idle if w.device == local_rank), idle[0])
        if worker.device < 0:  # a standby takes the device of the worker it stands in for
            taken = {w.device for w in self.pool.workers.values()}
            worker.device = min(set(range(self.settings.nproc_per_node)) - taken, default=local_rank)
        worker.role = role
        self._tee.succeed(players(self._log_dir.parent, role))
        environment = self._environment(role, worker.device)
        worker.post(Assign(role, self.settings.world_size, environment, plan or self._worker_plan()))
        return worker

    def _environment(self, role: int, local_rank: int) -> dict[str, str]:
        """The variables torchrun sets, and those by which an executed program could find us."""
        settings = self.settings
        host, port = self.plan["master"].rsplit(":", 1)
        return {
            "RANK": str(role),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_WORLD_SIZE": str(settings.nproc_per_node),
            "GROUP_RANK": str(role // settings.nproc_per_node),
            "GROUP_WORLD_SIZE": str(settings.nnodes),
            "ROLE_RANK": str(role),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(settings.world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.job_dir.name,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Otherwise torch ends every survivor that notices a lost peer; the engine aborts communicators.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
            "FT_JOB_DIR": str(self.job_dir),
            INJECT_ENV: settings.inject,
            **settings.environment,
        }

    # -- state ---------------------------------------------------------------------------------

    async def _restore(self, worker: Worker, role: int, plan: Message) -> None:
        """Have version `plan["version"]` of `role`, and of what it adopts, in memory here, then let its
        worker load it."""
        epoch, version = plan["epoch"], plan["version"]
        parts: list[CopyHere] = []
        for held in [role, *self._adopted_by(role)] if version is not None else []:
            memory = self.store.memory(held, adopted=held != role)
            found = memory.find(version)
            if found is None and plan["origin"] == "initial" and not plan["sources"].get(str(held)):
                continue  # its script makes the initial state by itself
            if found is None:
                try:
                    about = (held, plan, memory, self.transport, self.settings)
                    if plan["origin"] == "durable":
                        found = await self._on_storage(bring, *about)
                    else:
                        found = await asyncio.to_thread(bring, *about)
                except FtError as error:
                    log.error("node %s: role %d, version %d: %s", self.node, held, version, error)
                    self._say({"type": "restore_failed", "epoch": epoch, "role": role, "reason": str(error)})
                    return
            slot, buffer = found
            layouts = [segment.layout for segment in buffer.segments]
            parts.append(CopyHere(held, slot, buffer.memory.address, layouts))
        if self.epoch == epoch:
            worker.post(Restore(epoch, version, parts))

    def _adopted_by(self, role: int) -> list[int]:
        worker = self.pool.of_role(role)
        if worker is not None and worker.state_is_replicated:
            return []  # a plan that was made before it was known that every group has all the state
        return [int(r) for r, adopter in self.plan.get("adopted", {}).items() if adopter == role]

    def _adopted_here(self) -> list[int]:
        return [adopted for role in self.roles_here() for adopted in self._adopted_by(role)]

    def _answer(self, question: Question) -> Found:
        """Another agent asks. Runs in a thread of the transport."""
        if self._inquiries is None:
            raise FtError(f"node {self.node} is starting")
        return self._inquiries.answer(question)

    # -- workers -------------------------------------------------------------------------------

    async def _accept_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection. Only what is wrong with the connection ends it; other errors end this process."""
        try:
            channel = await AsyncChannel.accept(reader, writer, self.secret, FROM_WORKER)
            hello = await self._receive(channel)
            if hello is not None and not isinstance(hello, WorkerHello):
                raise ProtocolError(f"{channel.peer} did not greet, but sent {type(hello).__name__}")
            worker = self.pool.workers.get(hello.worker) if hello is not None else None
            if worker is None:
                return  # it has died since
            worker.channel = channel
            worker.post(Welcome(worker.control.memory.address))
            self._post({"type": "idle", "idle": len(self.pool.idle())})
            while (message := await self._receive(channel)) is not None:
                self._on_worker(worker, message)
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        except asyncio.CancelledError:
            pass  # this agent ends
        except Exception as error:
            self._fail(error)
        finally:
            writer.close()

    def _on_worker(self, worker: Worker, message: FromWorker) -> None:
        role = worker.role
        assert self._inquiries is not None
        if role is None:
            return
        match message:
            case Staged(of, version):
                self._commit(worker, of, version)
            case Allocate():
                segments = [Segment.of(layout) for layout in message.segments]
                adopted = message.role != role
                buffer = self.store.memory(message.role, adopted).allocate(message.slot, segments)
                layout = {s.id: list(s.holders) for s in segments}
                group = msgspec.to_builtins(worker.group)
                about = {"initial": worker.initial, "resumes": worker.resumes, "group": group}
                whose = {"role": message.role, "adopted": adopted, "epoch": self.epoch}
                self._say({"type": "layout", "segments": layout, **whose, **about})
                worker.post(Allocated(message.id, buffer.memory.address))
            case Registered(version, ring, resumes, group):
                worker.stage, worker.initial, worker.ring = "training", version, ring
                worker.resumes, worker.group = resumes, group
                self.replicator.register(role, ring)
                if role not in self.roles_here():
                    self._say({"type": "prepared", "role": role})
            case Quiesced(epoch, stage, counts):
                worker.quiesced, worker.stage, worker.counts = epoch, stage, counts
                self._report_if_quiet()
            case WorkerRestored(epoch, version, loaded):
                about = {"epoch": epoch, "version": version, "loaded": loaded}
                self._say({"type": "restored", **about, "role": role, "pid": worker.pid})
                for held in [role, *self._adopted_by(role)] if loaded else []:
                    self._commit(worker, held, version)
            case WorkerStepped(epoch, version):
                self._say({"type": "stepped", "epoch": epoch, "role": role, "version": version})
            case WorkerReopened(epoch):
                self._say({"type": "reopened", "epoch": epoch, "role": role})
            case WorkerUnprotected():
                self._say({"type": "unprotected", "role": role})
            case WorkerHeld(epoch):
                self._say({"type": "held", "epoch": epoch, "role": role})
            case WorkerCompleted(epoch, part, last):
                self._say({"type": "completed", "epoch": epoch, "role": role, "part": part, "last": last})
            case WorkerSuspects(epoch, reason):
                self._post({"type": "suspect", "epoch": epoch, "role": role, "reason": reason})
            case WorkerCounts(counts):
                self._post({"type": "counts", "role": role, "counts": counts})
            case WorkerIssued():
                self._post({"type": "issued", "role": role, **_fields(message)})
            case WorkerTrained():
                self._trained.append({"type": "trained", "role": role, **_fields(message)})
                self._post(self._trained[-1])
            case CorruptCopy(of, slot, reason):
                self.store.memory(of, of != role).strike(slot)
                self._say({"type": "restore_failed", "epoch": self.epoch, "role": role, "reason": reason})
            case AskStartupEntries() | AskProgress():
                self._tasks.spawn(self._inquiries.relay(worker, message, self.plan))
            case BringSettings(number, values):
                asked = {"type": "configure", "worker": worker.number, "id": number, "settings": values}
                self._asking[worker.number] = asked
                self._post(asked)
            case StartupEntries() | Progress():
                self._inquiries.answered(message)
            case ScriptFailed(said):
                worker.traceback = said
            case WorkerFinished():
                worker.finished = True
                self._say({"type": "finished", "role": role})
            case WorkerHello():
                self._refusals.add(f"worker {worker.number} greets once more")
            case _:
                assert_never(message)

    def _commit(self, worker: Worker, role: int, version: int) -> None:
        self._tasks.spawn(self._replicate(worker, role, version, self.epoch))

    async def _replicate(self, worker: Worker, role: int, version: int, epoch: int) -> None:
        gate = self.replicator.gate(self.pool.traffic, worker.control[Word.STEP_NS])
        failures = 0
        while self.epoch == epoch == self.plan.get("epoch"):
            try:
                await asyncio.to_thread(self.replicator.replicate, role, version, epoch, gate)
            except FtError as error:
                if self.epoch != epoch:
                    return
                failures += 1
                if failures == 1:  # the receiver is lost, as a rule, and the end of the epoch on its way
                    self._post({"type": "suspect", "epoch": epoch, "role": role, "reason": str(error)})
                elif failures == 2:
                    log.warning(
                        "node %s: role %d, version %d is not replicated yet, training waits, and it is tried "
                        "again: %s",
                        *(self.node, role, version, error),
                    )
                await asyncio.sleep(self.settings.heartbeat)
                continue
            if self.epoch == epoch and worker.role is not None:
                worker.replicated[role] = max(worker.replicated.get(role, -1), version)
                held = [worker.role, *self._adopted_by(worker.role)]
                worker.control[Word.COMMITTED] = min(worker.replicated.get(r, -1) for r in held)
                if worker.control[Word.COMMITTED] == version:
                    await self._write_durable(worker, worker.role, version)
            return

    async def _list_durable(self, number: int) -> None:
        """The controller needs to know which durable checkpoints can be read here."""
        where = self.settings.durable_dir, self.settings.world_size
        answer: Message = {"type": "durable_list", "id": number, "names": [], "error": ""}
        try:
            answer["names"] = await self._on_storage(durable.complete, *where)
        except OSError as error:
            answer["error"] = str(error)
        self._post(answer)

    async def _on_storage(self, call: Callable[..., T], *arguments: Any) -> T:
        """In a thread of those that may wait for storage: there are others for the network and for names."""
        return await asyncio.get_running_loop().run_in_executor(self._storage, call, *arguments)

    async def _write_durable(self, worker: Worker, role: int, version: int) -> None:
        interval, plan = self.settings.durable_interval, self.plan
        if not interval or version % interval:
            return
        if (plan["origin"], plan["version"]) == ("durable", version):
            return  # it is there
        failed = {"type": "durable_failed", "role": role, "version": version}
        if (earlier := self._writing.get(role)) is not None:  # each is one more copy of the state in memory
            reason = f"that of step {earlier} is still being written: storage is slower than the interval"
            self._post({**failed, "reason": reason})
            return
        self._writing[role] = version
        where = (self.settings.durable_dir, self.settings.world_size, self.store)
        try:
            about = (role, version, plan, worker.state_is_replicated)
            for each in await self._on_storage(durable.save, *where, *about):
                self._post({"type": "durable", "role": each, "version": version})
        except (OSError, FtError) as error:
            # A failed save must not end training: the in-memory copies are what protects it.
            log.error("node %s: durable checkpoint of step %d, role %d: %s", self.node, version, role, error)
            self._post({**failed, "reason": str(error)})
        finally:
            del self._writing[role]

    def _worker_ended(self, worker: Worker, ended: Exit) -> None:
        assert self._done is not None
        if self._done.done() or self._departure.explains(ended):
            return
        if worker.role is not None and not worker.finished:
            message = {"type": "worker_lost", "role": worker.role, "pid": worker.pid, "exit": str(ended)}
            self._say({**message, "crashed": ended.crashed, "code": ended.code, "traceback": ended.message})
        if not worker.finished:
            self.pool.start(worker.device if worker.role is None else -1)
        self._tasks.spawn(self._end_orphans())
        self._report_if_quiet()

    async def _end_orphans(self) -> None:
        await asyncio.to_thread(orphans.end)  # reads of every process of the machine

    def _kill(self, role: int | None) -> None:
        if role is None:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        elif (worker := self.pool.of_role(role)) is not None:
            self.pool.kill(worker)

    def _leave(self, code: int) -> None:
        """End this node alone, and let the controller know that no failure did it."""
        assert self._done is not None
        if not self._done.done():
            self._post({"type": "left"})
            self._end(code)

    async def _begin_again(self) -> NoReturn:
        """Become another agent of this machine: all that is held here is of another past of the job.

        The same process, so that whoever has started it need not know.
        """
        if not await asyncio.to_thread(orphans.end_all, _FAREWELL):
            log.error(
                "node %s: processes that it had started do not end, so it does not come back", self.node
            )
            sys.exit(1)
        await self._tee.close(_LAST_OUTPUT)
        await asyncio.to_thread(console().flush, _LAST_WORD)
        about = [parent.argument(), "--job-dir", str(self.job_dir)]
        about += ["--domain", self.domain, "--node", unique(self.node)]
        if temporary := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
            about += ["--temporary", temporary]
        os.execv(sys.executable, [sys.executable, "-m", "ft_core.node.agent", *about])

    async def _farewell(self) -> None:
        for worker in self.pool.playing():
            worker.post(EndScript())
        deadline = time.monotonic() + _FAREWELL
        while any(w.finished for w in self.pool.playing()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.pool.close()
        self.transport.close()
        while True:
            await asyncio.sleep(0.02)  # for the kernel to hand over what killed workers had started
            if await asyncio.to_thread(orphans.end) or time.monotonic() > deadline:
                break
        if not await self._tee.close(_LAST_OUTPUT):
            log.error(
                "node %s: the console, or storage, does not take what workers have printed last: see %s",
                *(self.node, self._log_dir),
            )
        await asyncio.to_thread(console().flush, _LAST_WORD)

    def _fail(self, error: Exception) -> None:
        """An error of this agent's own: its node is lost, rather than there and of no use."""
        assert self._done is not None
        if not self._done.done():
            self._done.set_exception(error)


def _fields(message: Any) -> Message:
    return {name: value for name, value in msgspec.to_builtins(message).items() if name != "type"}


def _own_host(controller: str) -> str:
    """The address of this machine that the controller's machine can reach; loopback stays loopback."""
    host, port = controller.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing; the kernel picks the interface
        return str(probe.getsockname()[0])


def main() -> int:
    """Entry of the agent process (started by `ftrun`, or by a recipe on each node)."""
    parser = argparse.ArgumentParser(prog="python -m ft_core.node.agent", description=__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--node", required=True, help="this node's name, unique in the job")
    parser.add_argument("--domain", default="", help="failure domain label (rack, switch); default: the node")
    parser.add_argument("--node-rank", type=int, default=-1, help="position at the start; -1: a spare")
    parser.add_argument("--temporary", help="directory for sockets, which whoever gives it removes")
    parent.add_argument(parser)
    args = parser.parse_args()
    parent.expect(args.parent)
    if args.temporary:  # multiprocessing would make one, and leave it behind when this process is killed
        multiprocessing.current_process()._config["tempdir"] = args.temporary  # type: ignore[attr-defined]
    log_to_console()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # a node's processes are one group: killed together, as a node would be
    orphans.adopt()
    # For the fork server, and for workers until they have a role: Slurm sends it to every process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Or asking whether there is a GPU, as DeepSpeed's import does, leaves the fork server's children none.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Connections break at every failure; c10d would write a C++ stack trace for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    collector.exempt()
    if parent.gone():
        _stop()
    settings = Settings.read(args.job_dir)
    check_limit(f"node {args.node}", *settings.size)
    agent = Agent(settings, args.job_dir, args.node, args.domain, args.node_rank)
    return asyncio.run(_serve(agent))


def _stop() -> NoReturn:
    """End this node and leave nothing behind: `ftrun`, who would see to that, is gone."""
    if temporary := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(temporary, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def _serve(agent: Agent) -> int:
    try:
        return await agent.run()
    except Exception:
        log.critical("node %s fails, and is lost to the job:\n%s", agent.node, traceback.format_exc())
        console().flush(_LAST_WORD)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # at once: the workers are of no use without their agent
        raise


if __name__ == "__main__":
    sys.exit(main())

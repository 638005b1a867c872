"""A worker's process around its machine: the connection to the agent, the thread that listens to it, the
process groups. It turns messages and what the main thread does into events for `worker.machine`, and the
machine's effects into what is done; it decides nothing.

Events are handled one after the other, each with its effects, under one lock. What the main thread reads in
every step it reads without (`epoch_is_over`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar, assert_never

from ft_core.comm.process_group import Communicators
from ft_core.errors import EpochChanged, FtError, ProtocolError
from ft_core.process.inject import ENV as INJECT_ENV
from ft_core.process.inject import Injector
from ft_core.protocol import messages as m
from ft_core.protocol.channel import Channel
from ft_core.protocol.groups import RecordCount, Series, parse
from ft_core.state.manifest import Segment
from ft_core.state.memory import ControlBlock, SharedMemory, Word
from ft_core.worker import events as e
from ft_core.worker import faults
from ft_core.worker.machine import WorkerMachine
from ft_core.worker.states import Finished, NoRole, State

log = logging.getLogger(__name__)
_NOTED = 5.0
"""Seconds that an agent has to take note of a failure."""
Reply = m.Allocated | m.Refused | m.ConfigureAnswer | m.StartupEntries | m.Progress
R = TypeVar("R", m.Allocated, m.ConfigureAnswer, m.StartupEntries, m.Progress)


class WorkerShell:
    """One worker's. It is there before the worker has a role."""

    comms: Communicators
    """The role's process groups, from when there is a role."""

    def __init__(self, channel: Channel[m.ToWorker], secret: bytes, job_dir: Path, worker: int) -> None:
        """Greets the agent. `worker` is the number that it has given this process."""
        self.machine = WorkerMachine(os.getpid())
        self.job_dir, self.number = job_dir, worker
        self.injector = Injector(job_dir, "")
        self.version = 0
        """How many steps the state of this role has seen."""
        self._channel, self.secret = channel, secret
        self._condition = threading.Condition()
        self._replies: dict[int, Reply | None] = {}
        """By request that somebody waits for, the reply once it is there."""
        self._numbers = itertools.count()
        self._noted = threading.Event()
        """The agent knows why this process ends."""
        channel.send(m.WorkerHello(worker, os.getpid()))
        welcome = channel.recv()
        if not isinstance(welcome, m.Welcome):
            raise ProtocolError(f"the agent greets with {welcome}")
        self.control = ControlBlock(SharedMemory.open(welcome.control))
        self.control.life.hold()
        threading.Thread(target=self._watch, name="ft-watcher", daemon=True).start()

    # -- the main thread -----------------------------------------------------------------------

    def wait_for_role(self) -> m.Assign:
        """Block until this worker is given a role; returns the agent's message."""
        self.wait_while(NoRole)
        return self._assignment

    def wait_while(self, *states: type[State]) -> State:
        """Block as long as the machine is in one of these states; returns the one that it is in then."""
        with self._condition:
            while isinstance(self.machine.state, states):
                deadline = self.machine.deadline
                left = None if deadline is None else deadline - time.monotonic()
                if left is None or left > 0:
                    self._condition.wait(left)
                else:
                    self.handle(e.Tick())
            return self.machine.state

    @property
    def about(self) -> dict[str, int]:
        """For its log."""
        return {"role": self.machine.role, "epoch": self.machine.epoch, "step": self.version}

    @property
    def epoch_is_over(self) -> bool:
        """Whether a newer one was announced."""
        return self.machine.announced > self.machine.epoch

    def check_epoch(self) -> None:
        """Raises EpochChanged if the epoch is over."""
        machine = self.machine
        if machine.announced > machine.epoch:
            raise EpochChanged(
                f"epoch {machine.announced} was announced; role {machine.role} leaves its step"
            )

    def point(self, name: str) -> None:
        """A place where a failure may be injected."""
        if self.injector.armed and not self.machine.plan.detached:
            self.injector.point(self.machine.role, name, self.version)

    def failed(self, failure: m.ScriptFailed) -> None:
        """Tell the agent why this process is about to end: else it might only see that it has."""
        self.send(failure)
        self._noted.wait(_NOTED)

    def replace(self, reason: str, fault: m.Fault = m.Fault.TERMINATED) -> NoReturn:
        """End this process, so that another takes its role over, or does what `fault` leads to."""
        log.warning("role %d: %s; its worker is replaced", self.machine.role, reason)
        self.failed(m.ScriptFailed(fault, reason, "", ""))
        logging.shutdown()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def finish(self) -> None:
        """Nothing of the script is left to be done in this process. Returns when the whole job is over."""
        self.handle(e.ScriptDone())
        self.wait_while(Finished)

    # -- the agent -----------------------------------------------------------------------------

    def send(self, message: m.FromWorker) -> None:
        """What decides nothing. Any thread."""
        self._channel.send(message)

    def ask(
        self, request: Callable[[int], m.FromWorker], kind: type[R], wanted: Callable[[], bool] = lambda: True
    ) -> R:
        """Send a request, given its number, and wait for the reply. Raises FtError if it is refused, or not
        `wanted` any more, which the machine's events tell."""
        number = next(self._numbers)
        with self._condition:
            self._replies[number] = None
        self.send(request(number))
        with self._condition:
            self._condition.wait_for(lambda: self._replies[number] is not None or not wanted())
            reply = self._replies.pop(number)
        if reply is None:
            raise FtError("the epoch ended before there was an answer")
        if isinstance(reply, m.Refused):
            raise FtError(reply.error)
        assert isinstance(reply, kind), f"{reply} answers a request for {kind.__name__}"
        return reply

    def allocate(self, role: int, slot: int, segments: list[Segment]) -> list[int]:
        """The address of fresh memory for a slot of a role's snapshots."""
        layouts = [segment.layout for segment in segments]
        return self.ask(lambda number: m.Allocate(number, role, slot, layouts), m.Allocated).address

    def _fetch_startup(self, holder: int, series: Series, start: int) -> dict[Series, list[m.StartupEntry]]:
        question = lambda number: m.AskStartupEntries(number, holder, str(series), start)  # noqa: E731
        epoch = self.comms.epoch
        reply = self.ask(question, m.StartupEntries, lambda: self.comms.aborted <= epoch)
        return {Series.parse(text): entries for text, entries in reply.entries.items()}

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: e.Event) -> None:
        """Any thread."""
        with self._condition:
            for effect in self.machine.handle(event, time.monotonic()):
                self._do(effect)
            self._condition.notify_all()

    def _watch(self) -> None:
        try:
            while True:
                self._hear(self._channel.recv())
        except OSError:
            # A worker without an agent must not linger.
            self.handle(e.AgentGone())
        except BaseException as error:
            log.exception("role %d: the watcher failed", self.machine.role)
            with contextlib.suppress(OSError):
                self.send(faults.own(error))  # nobody is left to hear that it was noted
            os._exit(1)

    def _hear(self, message: m.ToWorker) -> None:
        match message:
            case m.Allocated() | m.Refused() | m.ConfigureAnswer() | m.StartupEntries() | m.Progress():
                with self._condition:
                    if message.id in self._replies:  # else nobody waits for it any more
                        self._replies[message.id] = message
                    self._condition.notify_all()
            case m.FailureNoted():
                self._noted.set()
            case m.Welcome():
                raise ProtocolError("the agent greets once more")
            case _:
                self.handle(e.FromAgent(message))

    # -- effects -------------------------------------------------------------------------------

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Send(message):
                self.send(message)
            case e.TakeRole(assignment):
                self._take_role(assignment)
            case e.AbortBefore(epoch):
                self.comms.abort(epoch)
            case e.UsePlan(plan):
                self._swap(plan)
            case e.KeepRecords(wanted):
                self.comms.keep_records(wanted)
            case e.SayQuiesced(epoch, stage):
                self.send(m.Quiesced(epoch, stage, self.recorded()))
            case e.SayCounts():
                self.send(m.OperationCounts(self.machine.role, self.recorded()))
            case e.SayIssued(number, epoch, at_end):
                issued, unopened = self.comms.issued()
                about = self.version, at_end, _texts(issued), [str(group) for group in unopened]
                self.send(m.Issued(number, epoch, self.machine.role, *about))
            case e.SayProgress(number):
                self.send(m.Progress(number, self.version, self.recorded()))
            case e.SayEntries(number, group, start):
                entries = self.comms.startup_entries(Series.parse(group), start)
                self.send(m.StartupEntries(number, {str(series): rows for series, rows in entries.items()}))
            case e.EndProcess(code):
                os._exit(code)
            case _:
                assert_never(effect)

    def _take_role(self, assignment: m.Assign) -> None:
        self._assignment = assignment
        self.injector = Injector(self.job_dir, assignment.env[INJECT_ENV])
        about = assignment.role, assignment.plan.began_with.roles, self._suspect, self.secret
        self.comms = Communicators(*about, flight=self.control.flight)
        self.comms.traffic, self.comms.hung, self.comms.passed = self._traffic, self._hung, self.passed
        self.comms.reopened = lambda epoch: self.handle(e.Reopened(epoch))

    def _swap(self, plan: m.WorkerPlan) -> None:
        completed = {parse(text): (count, role) for text, (count, role) in plan.completed.items()}
        about = (completed, self._fetch_startup, plan.absent, bool(plan.adopted), plan.newcomers)
        self.comms.swap(plan.epoch, plan.store, *about)

    def is_at(self, version: int) -> None:
        """The state is of this version."""
        self.version = version
        self.control[Word.VERSION] = self.control[Word.TAG] = version
        self.comms.flight.step = version

    def passed(self) -> None:
        """A newcomer's script has passed over something that was done before: it gets on."""
        self.control[Word.PASSED] += 1

    def recorded(self) -> dict[str, int]:
        """Start-up operations, by group."""
        return _texts(self.comms.startup_counts())

    def _suspect(self, reason: str, by_link: bool = False) -> None:
        self.handle(e.Suspects(reason, by_link))

    def _hung(self, reason: str, by_link: bool) -> None:
        """The main thread may wait for the device, which nobody can interrupt."""
        log.error("role %d: %s", self.machine.role, reason)
        fault = m.Fault.LINK if by_link else m.Fault.TRANSPORT
        self.failed(m.ScriptFailed(fault, reason, "", reason))
        logging.shutdown()
        self.handle(e.Hung())

    def _traffic(self, in_flight: int) -> None:
        self.control[Word.TRAFFIC] = in_flight


def _texts(counts: Mapping[RecordCount, int] | Mapping[Series, int]) -> dict[str, int]:
    """Counts as they travel."""
    return {str(what): count for what, count in counts.items()}

"""A worker's runtime: its link to the agent, its step boundary, and its way through a recovery.

One watcher thread listens to the agent; it aborts the communicators of an epoch that ended, which
makes the main thread unwind to `Session.protect`, or to the engine call of a script that is protected in
place (`begin`, `recover`). Everything else happens in the main thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from ft_core.adapter import Adapter
from ft_core.comm.process_group import Communicators
from ft_core.elastic.rules import AHEAD, Membership, Start, lr_factor
from ft_core.errors import ConfigError, CorruptSnapshot, EpochChanged, FtError, ProtocolError
from ft_core.process.collector import Pause
from ft_core.process.inject import ENV as INJECT_ENV
from ft_core.process.inject import Injector
from ft_core.protocol.channel import Channel
from ft_core.protocol.groups import Series, Tally, parse
from ft_core.protocol.messages import (
    Abort,
    Allocate,
    Allocated,
    AskProgress,
    AskStartupEntries,
    Assign,
    BringSettings,
    CorruptCopy,
    Dealt,
    EntriesBrought,
    Exit,
    FromWorker,
    Hold,
    PlanBegins,
    Progress,
    ProgressBrought,
    Quiesced,
    Refused,
    Registered,
    Release,
    Restore,
    ScriptFailed,
    SendCounts,
    SendIssued,
    SendProgress,
    SendStartupEntries,
    Setting,
    SettingsTaken,
    Staged,
    StartupEntries,
    StartupEntry,
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
from ft_core.state.adoption import Snapshots
from ft_core.state.envelope import decode
from ft_core.state.manifest import Segment
from ft_core.state.memory import IN_OPTIMIZER, ControlBlock, SharedMemory, Word
from ft_core.state.snapshot import settle
from ft_core.worker.logs import played, printed

log = logging.getLogger(__name__)
T = TypeVar("T")
Reply = Allocated | Refused | SettingsTaken | EntriesBrought | ProgressBrought
R = TypeVar("R", Allocated, SettingsTaken, EntriesBrought, ProgressBrought)

_HOLD_LIMIT = 2.0
"""Seconds that a role waits at the end of a step for those who come back, should the controller be gone."""

_current: Session | None = None


def current() -> Session | None:
    """The session of this process, or None when it was not started by `ftrun`."""
    return _current


class Stage(StrEnum):
    """How far a worker's script has come."""

    STARTUP = "startup"
    TRAINING = "training"
    FINISHED = "finished"


class Session:
    """One worker's part in the job. It is there before the user's script starts: see `current`."""

    def __init__(self, channel: Channel[ToWorker], secret: bytes, job_dir: Path, worker: int) -> None:
        self._channel, self._secret = channel, secret
        self._condition = threading.Condition()
        self._replies: dict[int, Reply] = {}
        self._ids = itertools.count()
        self._assignment: Assign | None = None
        self._plan: WorkerPlan
        """Of the newest epoch that this worker knows the plan of; once it has a role."""
        self._restore: Restore | None = None
        self._pending = 0
        self._stage = Stage.STARTUP
        self._exit = threading.Event()
        self._part = 0
        self._parts_done = 0
        self._at_end = False
        """Whether this role waits for others at the end of its script, or of a part of it."""
        self._injector = Injector(job_dir, "")
        self._adapter: Adapter | None = None
        self._redo: Callable[[], None] = lambda: None
        self._snapshots: Snapshots | None = None
        self._unprotected: str | None = None
        """Why nothing is, if so."""
        self._report_step = False
        self._hold_in = self._hold_at = 0
        """The epoch in which this role is to stop at the end of a step, and the step."""
        self._step_began = 0
        self._collection = Pause()
        self.job_dir = job_dir
        self.epoch = 0
        """The assignment of roles to workers that this worker is in: 1, and 1 more with every recovery."""
        self.role = -1
        """The global rank that this worker plays."""
        self.world_size = 0
        """How many roles the job has."""
        self.version = 0
        """How many steps the state of this role has seen."""
        self.membership = Membership(1)
        """Which replica groups take part in which step."""
        self.predecessors: list[Path] = []
        """Log directories, as far as they can be seen here, of the workers that played this role before."""
        channel.send(WorkerHello(worker, os.getpid()))
        welcome = channel.recv()
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"the agent greets with {welcome}")
        self.control = ControlBlock(SharedMemory.open(welcome.control))
        threading.Thread(target=self._watch, name="ft-watcher", daemon=True).start()

    # -- before the script ---------------------------------------------------------------------

    def wait_for_role(self) -> Assign:
        """Block until this worker is given a role; returns the agent's assignment."""
        global _current
        with self._condition:
            self._condition.wait_for(lambda: self._assignment is not None)
            assert self._assignment is not None
            assignment = self._assignment
        _current = self
        return assignment

    def leave(self) -> None:
        """The script's last line is done. Returns when it is on every role, so that nobody misses a peer."""
        if self._stage is Stage.TRAINING and self.protecting:
            self._part += 1
            self._persist(lambda: self._complete(last=True), self.recover)

    def finish(self) -> None:
        """Nothing of the script is left to be done in this process. Returns when the whole job is over."""
        self._set_stage(Stage.FINISHED)
        self._at_end = True
        self._channel.send(WorkerFinished())
        self._exit.wait()

    def failed(self, traceback: str) -> None:
        """The script raised an error of its own: the agent is told why before this process ends."""
        self._send(ScriptFailed(traceback))

    # -- the step ------------------------------------------------------------------------------

    def protect(self, adapter: Adapter, train: Callable[[], T], version: int) -> T:
        """Run `train` to its end through any number of recoveries, and return what it returns.

        `train` must take up the work at `self.version` whenever it is called: after a recovery it is
        called again, on every role alike. `version` is the number of steps that the state has seen, the same
        on all roles: 0, or that of the script's own checkpoint. Once per process, on every role; only local
        work may follow.

        Errors that no recovery explains are the caller's and pass through. Raises ConfigError where the job
        cannot be protected.
        """
        self.begin(adapter, version, lambda: None)
        return self.part(train, last=True)

    def part(self, call: Callable[[], T], passed: Callable[[], T] | None = None, last: bool = False) -> T:
        """One part of a script that is protected in place: a call that every role makes.

        After a recovery it is made again, on every role alike, with the state of `self.version`. All roles
        leave it together, so that a failure in its last collective is recovered too, also where they leave
        by SystemExit, which makes it the last. One that tells of an error passes at once: it ends the job.
        A newcomer whose peers have left it does not make it: `passed` says what it returned. `last`: only
        local work comes after it, and a failure then costs nothing.
        """
        self._part += 1
        result: Callable[[], T] | None = passed

        def made() -> None:
            nonlocal result
            if self._parts_done >= self._part:
                return
            leaves = False
            with self.inside():
                try:
                    value = call()
                    result = lambda: value  # noqa: E731
                except SystemExit as stop:
                    self.raise_if_moved()  # a script may make such an exit of what ends an epoch
                    if exit_code(stop):
                        raise  # nobody else need come to the same: it is the end of the job
                    result, leaves = _raising(stop), True
            self._complete(last or leaves)

        self._persist(made, self.recover)
        assert result is not None
        return result()

    def begin(self, adapter: Adapter, version: int, redo: Callable[[], None], resumes: bool = False) -> None:
        """Protect in place a script that has no training function to enter again.

        From here on collectives count as the framework's step only `inside` its calls. All others are
        recorded, as those of start-up are, and one that a failure interrupts is completed in the next
        epoch (see `startup`): before it is issued again, `recover` is called. `redo` brings a role from
        `self.version`, which was loaded, to the place where it was interrupted. `resumes`: started again,
        the script goes on from its own newest checkpoint, so that is what the job falls back to.

        Raises ConfigError where the job cannot be protected, FtError where the process is already.
        """
        if self._snapshots is not None:
            raise FtError("only one training function, or one engine, can be protected in a process")
        if self._unprotected is not None:
            raise ConfigError(f"this job cannot be protected: {self._unprotected}")
        with self._condition:
            # An abort answered by the watcher on behalf of a worker in start-up is completed first.
            self._condition.wait_for(lambda: self._pending <= self.epoch)
            self.comms.startup.training_begins(self.recover)
            self._stage = Stage.TRAINING
        objection = self.start.objection(adapter.replica_group, self.role, version)
        if objection and not self.joining:
            raise ConfigError(objection)
        self._redo, self._adapter = redo, adapter
        self.version = version
        self.control[Word.VERSION] = self.control[Word.TAG] = version
        self._snapshots = Snapshots(
            self.role,
            adapter,
            self._allocate,
            self._staged,
            on_copy=lambda: self.point("d2h"),
            moved=lambda: self._pending > self.epoch,
        )
        self._send(Registered(version, list(adapter.ring), resumes, adapter.replica_group))
        self._persist(self._catch_up, self._quiesce)

    def rehearse(self, adapter: Adapter, step: Callable[[], object]) -> None:
        """Before `begin`, where others train meanwhile: do a step without them.

        What is slow the first time (kernels, caches, the optimizer's state) is behind this role when they
        wait for it. A rehearsal that fails does no harm: all that a step changes is loaded afterwards.
        """
        if not self._ahead:
            return
        try:
            with self.comms.startup.rehearsal():
                step()
        except Exception as error:
            log.warning("role %d could not rehearse a step, and its first is slower: %r", self.role, error)
        adapter.reset()

    def foresee(self) -> tuple[int, Any] | None:
        """Before `begin`, where others train meanwhile: (version, envelope) of who stands for this role.

        The script can be brought to `version` without them: of what it does outside of the framework's calls
        until there, the results are on record. None where nobody trains without this role.
        """
        if not self._ahead:
            return None
        holder = self._plan.ahead[self.role]
        try:
            found = self._ask(lambda number: AskProgress(number, holder), ProgressBrought)
            envelope = decode(found.envelope.encode())
        except (FtError, ValueError) as error:
            log.info("role %d: %s; its script gets to the others with the epoch to come", self.role, error)
            return None
        self.membership = _membership(self._plan)
        self.comms.learn({parse(text): (count, holder) for text, count in found.counts.items()})
        return found.version - 1, envelope  # which all roles have done

    @property
    def _ahead(self) -> bool:
        return self.role in self._plan.ahead

    @property
    def joining(self) -> bool:
        """Whether the state this role goes on from is held elsewhere: its own start-up does not make it."""
        return self._plan.origin in ("memory", "durable")

    @property
    def started_over(self) -> bool:
        """Whether the job has fallen back to what its script makes when it is started again."""
        return bool(self._plan.started_over)

    @property
    def elastic(self) -> bool:
        """Whether replica groups may leave (policy `shrink`)."""
        return self._plan.policy == "shrink"

    @property
    def absent(self) -> frozenset[int]:
        """Roles whose replica groups are away."""
        return frozenset(self._plan.absent)

    def printed(self, text: str, roles: Iterable[int] = ()) -> bool:
        """Whether a worker that has played this role before has printed `text` of late, or any of `roles`.

        As far as its output can be seen here: the job directory is shared, or the node the same.
        """
        since = self._plan.started_over
        others = [path for role in roles for path in played(self.job_dir / "logs", role, since)]
        return printed(text, [*self.predecessors, *others])

    @property
    def start(self) -> Start:
        """The roles that the job began with."""
        began = self._plan.began_with
        return Start(began.roles, began.stages, began.there)

    @property
    def taking_part(self) -> tuple[int, ...]:
        """The replica groups that exchange gradients in the step under way."""
        return self.membership.taking_part(self.version + 1)

    @property
    def contributing(self) -> tuple[int, ...]:
        """The replica groups whose gradients count in the step under way."""
        return self.membership.contributing(self.version + 1)

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied by in the step under way: 1.0 while all replica groups
        train."""
        return lr_factor(self._plan.lr_intervention, len(self.contributing), self.membership.groups)

    @property
    def protecting(self) -> bool:
        """Whether training is protected, or has begun to be."""
        return self._snapshots is not None

    def recover(self) -> None:
        """The epoch is over: take up the next one, in place. Main thread, outside the framework's calls."""
        self._quiesce()
        self._persist(self._catch_up, self._quiesce)

    def inside(self) -> AbstractContextManager[None]:
        """Wraps a call of the framework's that is done again from its beginning when a failure interrupts it.

        Its collectives are not recorded; they raise EpochChanged when the epoch is over.
        """
        return self.comms.startup.paused()

    def moved(self, error: Exception) -> bool:
        """Whether a new epoch explains `error`. Drops what the abandoned call has left on its frames."""
        if not isinstance(error, EpochChanged) and self._pending <= self.epoch:
            return False
        traceback.clear_frames(error.__traceback__)  # the step's tensors hang on them
        return True

    def raise_if_moved(self) -> None:
        """Leave the step when a new epoch was announced, and not in its next collective. Raises
        EpochChanged."""
        if self._pending > self.epoch:
            raise EpochChanged(f"epoch {self._pending} was announced; role {self.role} leaves its step")

    def restart(self, reason: str) -> NoReturn:
        """This process cannot get to where its peers are: end it, so that another takes its role over."""
        log.warning("role %d: %s; its worker is replaced", self.role, reason)
        logging.shutdown()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def configure(self, settings: Mapping[str, Setting]) -> None:
        """Settings that the script brings (names as in `Settings`). Raises FtError if they cannot be had."""
        self._ask(lambda number: BringSettings(number, dict(settings)), SettingsTaken)
        with self._condition:  # the plan of this epoch was made before
            known = ("policy", "lr_intervention")
            self._plan = replace(self._plan, **{k: settings[k] for k in known if k in settings})

    def unprotected(self, reason: str = "") -> None:
        """The script wants no fault tolerance, or cannot have it for `reason`: nothing is recorded, and a
        failure ends the job."""
        if self._unprotected is not None:
            return
        self._unprotected = reason or "another part of the script has asked for no fault tolerance"
        if reason and self.role == 0:
            log.warning("%s: any failure ends this job", reason)
        self.comms.end_startup()
        self._set_stage(Stage.TRAINING)
        self._send(WorkerUnprotected())

    def commit_wait(self) -> None:
        """Wait until this version is staged here and verified at the nodes that keep copies of it (DeadPool,
        section VI-A).

        Called in each step before this role contributes to the barrier, which is any collective that cannot
        end before all roles have entered it; see docs/recovery_rule.md for why not after it. Raises
        EpochChanged when a failure comes first.
        """
        if self._snapshots is None:  # a rehearsal
            return
        started = time.monotonic_ns()
        pause = 20e-6
        while self.control[Word.COMMITTED] < self.version:
            self.raise_if_moved()
            if (failure := self._snapshots.failed) is not None:
                raise failure
            time.sleep(pause)
            pause = min(2e-3, pause * 1.5)
        self.control[Word.WAITED_NS] += time.monotonic_ns() - started

    def optimizer_begins(self) -> None:
        """The barrier is passed: from here on the state changes. Raises EpochChanged if it was not.

        Called in each step between the barrier and the first change of the state. With NCCL the host runs
        ahead of the exchanges, and an aborted one ends like any other, with garbage: so it is waited for
        them, and only then looked whether the epoch is over. The abort comes after the announcement.
        """
        if self._snapshots is None:  # a rehearsal
            return
        if self.control[Word.TAG] != IN_OPTIMIZER:  # some optimizers begin several times in a step
            settle()
            self.raise_if_moved()
        self.control[Word.TAG] = IN_OPTIMIZER
        self._snapshots.step_begins()
        self.point("optimizer")

    def step_done(self, trained: Mapping[str, Any] | None = None) -> None:
        """The step is complete on this role: its state is a new version, which is staged at once.

        Copying goes on behind the next forward pass. `trained`: for the ledger, the samples of the step as
        `ft_core.elastic.rules.Deal` has them, with policy `shrink` only. One role of each replica group gives
        them: all groups know the same, and the ledger must not lose a step with one.
        """
        assert self._snapshots is not None
        self._collection.end()
        now = time.monotonic_ns()
        if self._step_began:
            self.control[Word.STEP_NS] = now - self._step_began
        self._step_began = now
        self.version += 1
        self.control[Word.VERSION] = self.control[Word.TAG] = self.version
        if self._report_step:
            self._report_step = False
            self._send(WorkerStepped(self.epoch, self.version))
        self._snapshots.stage(self.version)
        if trained is not None and self.elastic:
            dealt = msgspec.convert(trained, Dealt, str_keys=True)
            self._send(WorkerTrained(self.epoch, self.version, dealt))
        self._hold()

    def _hold(self) -> None:
        """A replica group comes back: wait for that here, where nothing is under way that would be lost."""
        if self._hold_in != self.epoch or self.version < self._hold_at:
            return
        self._collection.begin()
        self._send(WorkerHeld(self.epoch))
        with self._condition:
            self._condition.wait_for(
                lambda: self._pending > self.epoch or self._hold_in != self.epoch, _HOLD_LIMIT
            )
            self._hold_in = 0

    def point(self, name: str) -> None:
        """A place where `--ft-inject` may have this worker or its node killed; `name`: one of
        `ft_core.process.inject.POINTS`."""
        if self._injector.armed:
            self._injector.point(self.role, name, self.version)

    @property
    def injecting(self) -> bool:
        """Whether failures are to be injected in this job."""
        return self._injector.armed

    # -- recovery, main thread -----------------------------------------------------------------

    def _persist(self, action: Callable[[], T], between: Callable[[], None]) -> T:
        """`action`, and after each epoch change `between` and `action` again."""
        while True:
            try:
                return action()
            except Exception as error:
                if not self.moved(error):
                    raise
            between()

    def _catch_up(self) -> None:
        self._resume()
        self._redo()

    def _complete(self, last: bool) -> None:
        """Wait until every role has come to the end of this part.

        Who leaves earlier could no longer take part when a peer fails in its last collective.
        """
        assert self._snapshots is not None
        self._snapshots.wait()
        self._collection.end()  # no step may follow
        self._send(WorkerCompleted(self.epoch, self._part, last))
        with self._condition, self._waiting():
            self._condition.wait_for(lambda: self._parts_done >= self._part or self._pending > self.epoch)
            if self._parts_done >= self._part:
                if last:
                    self._stage = Stage.FINISHED
                return
        self.raise_if_moved()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._at_end = True
        try:
            yield
        finally:
            self._at_end = False

    def _resume(self) -> None:
        assert self._snapshots is not None and self._adapter is not None
        self._collection.begin()  # a newcomer has not been in `_quiesce`
        membership = _membership(self._plan)
        if not membership.groups:  # the plan was made before the roles had told of their groups
            membership = self.start.membership(self._adapter.replica_group.groups)
        if membership != self.membership and self.role == min(set(range(self.world_size)) - self.absent):
            self._tell(membership, self._plan.version or 0)
        self.membership = membership
        if self.epoch > 1:
            self.point("recovery")
        restore = self._await_restore()
        adopted = (role for role, adopter in self._plan.adopted.items() if adopter == self.role)
        held = self._snapshots.adopt(adopted)
        parts = [part for part in restore.parts if part.role in held]
        without = held - {self.role, *(part.role for part in parts)}
        if without and (self.version or without & set(self.start.present)):
            raise FtError(f"role {self.role} has no copy of what roles {sorted(without)} had alone")
        for part in parts:
            assert restore.version is not None
            try:
                self._snapshots.load(part, restore.version)
            except CorruptSnapshot as error:
                # The copy is struck off, and the controller decides again without it.
                self._send(CorruptCopy(part.role, part.slot, str(error)))
                self._await_epoch()
        loaded = any(part.role == self.role for part in parts)
        if loaded and restore.version is not None:
            self.version = self.control[Word.STAGED] = restore.version
        else:
            self._snapshots.stage(self.version)
        self.control[Word.VERSION] = self.control[Word.TAG] = self.version
        self._step_began = time.monotonic_ns()
        self._report_step = True
        self._send(WorkerRestored(self.epoch, self.version, loaded))

    def _quiesce(self) -> None:
        assert self._snapshots is not None and self._adapter is not None
        self._collection.begin()
        try:
            self._snapshots.wait()
        except Exception:
            log.exception("role %d: staging version %d failed; the copy is not used", self.role, self.version)
        self._adapter.reset()
        while True:
            with self._condition:
                epoch = self._pending
            self._send_quiesced(epoch, self._stage)
            with self._condition:
                self._condition.wait_for(
                    lambda e=epoch: self._pending > e or self._plan.epoch >= e  # type: ignore[misc]
                )
                if self._pending == self._plan.epoch:
                    plan = self._plan
                    break
        self._swap(plan)
        self.comms.reset()
        self.epoch = plan.epoch

    def _tell(self, membership: Membership, version: int) -> None:
        """The log says what becomes of the learning rate."""
        for step in range(version + 1, version + AHEAD + 2):
            live = len(membership.contributing(step))
            if live != len(membership.contributing(step - 1)):
                factor = lr_factor(self._plan.lr_intervention, live, membership.groups)
                log.warning(
                    "from step %d on %d of %d replica groups train: learning rate x %.4f (%s)",
                    *(step, live, membership.groups, factor, self._plan.lr_intervention),
                )

    def _swap(self, plan: WorkerPlan) -> None:
        completed = {parse(text): (count, role) for text, (count, role) in plan.completed.items()}
        about = (completed, self._fetch_startup, plan.absent, bool(plan.adopted), plan.newcomers)
        self.comms.swap(plan.epoch, plan.store, *about)

    def _send_quiesced(self, epoch: int, stage: Stage) -> None:
        counts = _texts(self.comms.startup_counts())
        self._send(Quiesced(epoch, "startup" if stage is Stage.STARTUP else "training", counts))

    def _await_restore(self) -> Restore:
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._pending > self.epoch
                    or (self._restore is not None and self._restore.epoch == self.epoch)
                )
            )
            self.raise_if_moved()
            assert self._restore is not None
            return self._restore

    def _await_epoch(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._pending > self.epoch)
        self.raise_if_moved()

    # -- the agent -----------------------------------------------------------------------------

    def _send(self, message: FromWorker) -> None:
        self._channel.send(message)

    def _ask(self, request: Callable[[int], FromWorker], kind: type[R]) -> R:
        """Send a request, given its number, and wait for the reply. Raises FtError if it is refused."""
        number = next(self._ids)
        self._send(request(number))
        with self._condition:
            self._condition.wait_for(lambda: number in self._replies)
            reply = self._replies.pop(number)
        if isinstance(reply, Refused):
            raise FtError(reply.error)
        assert isinstance(reply, kind), f"{reply} answers a request for {kind.__name__}"
        return reply

    def _allocate(self, role: int, slot: int, segments: list[Segment]) -> list[int]:
        layouts = [segment.layout for segment in segments]
        return self._ask(lambda number: Allocate(number, role, slot, layouts), Allocated).address

    def _staged(self, role: int, version: int) -> None:
        if role == self.role:
            self.control[Word.STAGED] = version
        self._send(Staged(role, version))

    def _fetch_startup(self, holder: int, series: Series, start: int) -> dict[Series, list[StartupEntry]]:
        question = lambda number: AskStartupEntries(number, holder, str(series), start)  # noqa: E731
        reply = self._ask(question, EntriesBrought)
        return {Series.parse(text): entries for text, entries in reply.entries.items()}

    def _set_stage(self, stage: Stage) -> None:
        with self._condition:
            self._stage = stage

    # -- watcher thread ------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while True:
                self._handle(self._channel.recv())
        except OSError:
            # The agent is gone, and with it this node: a worker without one must not linger.
            os._exit(1)
        except BaseException:
            log.exception("role %d: the watcher failed", self.role)
            os._exit(1)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Abort(epoch):
                self._abort(epoch)
            case PlanBegins(plan):
                self._planned(plan)
            case Assign():
                self._assigned(message)
            case Restore():
                with self._condition:
                    self._restore = message
                    self._condition.notify_all()
            case Allocated() | Refused() | SettingsTaken() | EntriesBrought() | ProgressBrought():
                with self._condition:
                    self._replies[message.id] = message
                    self._condition.notify_all()
            case SendStartupEntries(number, group, start):
                entries = self.comms.startup_entries(Series.parse(group), start)
                self._send(StartupEntries(number, {str(series): rows for series, rows in entries.items()}))
            case SendCounts():
                self.comms.keep_records(True)  # a replica group is about to come back
                self._send(WorkerCounts(_texts(self.comms.startup_counts())))
            case SendIssued(number):
                issued = _texts(self.comms.issued())
                self._send(WorkerIssued(number, self.epoch, self.version, self._at_end, issued))
            case SendProgress(number):
                self._send(Progress(number, self.version, _texts(self.comms.startup_counts())))
            case Hold(epoch, step):
                if not epoch:  # it does not come after all
                    self.comms.keep_records(False)
                with self._condition:
                    self._hold_in, self._hold_at = epoch, step
                    self._condition.notify_all()
            case Release(parts):
                with self._condition:
                    self._parts_done = parts
                    self._condition.notify_all()
            case Exit():
                self._exit.set()
            case Welcome():
                raise ProtocolError("the agent greets once more")
            case _:
                assert_never(message)

    def _assigned(self, message: Assign) -> None:
        self.role, self.world_size = message.role, message.world_size
        self._injector = Injector(self.job_dir, message.env[INJECT_ENV])
        self.comms = Communicators(self.role, self.world_size, self._suspect, self._secret)
        self.comms.traffic, self.comms.hung = self._traffic, self._hung
        self.comms.reopened = lambda epoch: self._send(WorkerReopened(epoch))
        plan = message.plan
        self._swap(plan)
        with self._condition:
            self._pending = self.epoch = plan.epoch
            self._plan, self._parts_done = plan, plan.parts
            self._assignment = message
            self._condition.notify_all()

    def _abort(self, epoch: int) -> None:
        with self._condition:
            if epoch <= self._pending or self.role < 0:
                return
            self._pending = epoch
            stage = self._stage
            self.comms.abort(epoch)
            self._condition.notify_all()
        if stage is not Stage.TRAINING:
            self._send_quiesced(epoch, stage)

    def _planned(self, plan: WorkerPlan) -> None:
        with self._condition:
            if plan.epoch != self._pending:
                return
            self._plan, self._parts_done = plan, plan.parts
            if self._stage is not Stage.TRAINING:
                self._swap(plan)
                self.epoch = plan.epoch
            self._condition.notify_all()

    def _suspect(self, reason: str) -> None:
        self._send(WorkerSuspects(self.epoch, reason))

    def _hung(self, reason: str) -> None:
        """The main thread may wait for the device, which nobody can interrupt: this process ends."""
        log.error("role %d: %s", self.role, reason)
        self.failed(reason)
        logging.shutdown()
        os._exit(1)

    def _traffic(self, in_flight: int) -> None:
        self.control[Word.TRAFFIC] = in_flight


def _membership(plan: WorkerPlan) -> Membership:
    return Membership(plan.membership.groups, plan.membership.changes)


def _texts(counts: Mapping[Tally, int] | Mapping[Series, int]) -> dict[str, int]:
    """As they travel."""
    return {str(what): count for what, count in counts.items()}


def exit_code(stop: SystemExit) -> int:
    """The code that the interpreter would end with."""
    return 0 if stop.code is None else stop.code & 0xFF if isinstance(stop.code, int) else 1


def _raising(stop: SystemExit) -> Callable[[], NoReturn]:
    def leave() -> NoReturn:
        raise stop

    return leave

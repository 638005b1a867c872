"""What the adapter of a framework, and a training loop of its own, meet of a worker: the step boundary, and
the way into training again after a recovery.

Behind it are the machine (`worker.machine`), its shell and what the main thread does between two epochs
(`worker.recovery`). When an epoch is over, the main thread unwinds to `Session.protect`, or to the engine
call of a script that is protected in place (`worker.in_place`). Main thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist

from ft_core.adapter import Adapter
from ft_core.comm.collectives import FtProcessGroup
from ft_core.comm.process_group import Communicators
from ft_core.errors import ConfigError, FtError
from ft_core.overlay import Overlay
from ft_core.process.stream import settle
from ft_core.process.timeline import timeline
from ft_core.protocol import messages as m
from ft_core.protocol.groups import GroupId
from ft_core.state.memory import IN_OPTIMIZER, Word, word_of_loss
from ft_core.worker import bit_flip, imports, marks
from ft_core.worker import events as e
from ft_core.worker.data_waits import data_waits
from ft_core.worker.groups import Groups
from ft_core.worker.in_place import InPlace
from ft_core.worker.logs import played, printed
from ft_core.worker.ordinary import exit_code
from ft_core.worker.recovery import Ahead, Recovery
from ft_core.worker.shell import WorkerShell
from ft_core.worker.states import StartUp, Trained

log = logging.getLogger(__name__)
T = TypeVar("T")

_current: Session | None = None


def current() -> Session | None:
    """The session of this process, or None when it was not started by `ftrun`."""
    return _current


def begin(session: Session) -> None:
    """From here on it is the `current` one of this process."""
    global _current
    _current = session


class Session:
    """One worker's part in the job. It is there before the user's script starts: see `current`."""

    def __init__(
        self,
        shell: WorkerShell,
        predecessors: Iterable[Path] = (),
        ahead: Ahead | None = None,
    ) -> None:
        """`ahead` is told how far this worker is, where it starts a role ahead of need."""
        self._about_ahead = ahead or Ahead()
        self._shell, self._machine = shell, shell.machine
        self.predecessors = list(predecessors)
        """Log directories, as far as they can be seen here, of the workers that played this role before."""
        self._recovery: Recovery | None = None
        self._part = 0
        self._began_at = 0
        """The version that the script has begun with."""
        self._unprotected: str | None = None
        """Why nothing is, if so."""
        self._control = shell.control
        self._waited_in_step = 0
        """Nanoseconds for which the step under way has waited for copies."""
        self.job_dir: Path = shell.job_dir
        """Where all processes of the job write."""
        self.groups = Groups(shell)
        """The replica groups that take part."""
        self.overlay = Overlay()
        """The layer above real files, while a newcomer's script is on its way."""
        self.in_place = InPlace(shell, self.groups, self.overlay, lambda: self._protected)
        """For a script that is protected as it is."""

    @property
    def role(self) -> int:
        """The global rank that this worker plays."""
        return self._machine.role

    @property
    def secret(self) -> bytes:
        """The job's secret, which all of its workers have from their agents."""
        return self._shell.secret

    @property
    def world_size(self) -> int:
        """How many roles the job has."""
        return self._machine.world_size

    @property
    def epoch(self) -> int:
        """The assignment of roles to workers that this worker is in: 1, and 1 more with every recovery."""
        return self._machine.epoch

    @property
    def version(self) -> int:
        """How many steps the state of this role has seen."""
        return self._shell.version

    @property
    def every(self) -> int:
        """A version is protected every so many steps."""
        return self._plan.every

    @property
    def oldest_version(self) -> int:
        """No recovery goes further back, as far as this role knows."""
        return self._protected.oldest

    @property
    def has_advanced(self) -> bool:
        """Whether the state has seen steps since the script began."""
        return self.version > self._began_at

    @property
    def comms(self) -> Communicators:
        """The process groups."""
        return self._shell.comms

    def find_group(self, identity: GroupId) -> FtProcessGroup | None:
        """The process group that all its members call so; None where there is none."""
        return self.comms.find(identity)

    def leave(self) -> None:
        """The script's last line is done. Returns when it is on every role, so that nobody misses a peer.

        Called once the script has ended by itself; no adapter need.
        """
        self.overlay.end()
        if self._recovery is not None and not isinstance(self._machine.state, Trained):
            self._part += 1
            recovery, part = self._recovery, self._part
            recovery.persist(lambda: recovery.complete(part, last=True), recovery.recover)

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
        self.overlay.end()
        self._part += 1
        result: Callable[[], T] | None = passed
        recovery = self._protected

        def made() -> None:
            nonlocal result
            ends = last
            if self._machine.parts < self._part:
                with self.in_place.inside():
                    try:
                        recovery.derive()
                        value = call()
                        result = lambda: value  # noqa: E731
                    except SystemExit as stop:
                        self.check_epoch()  # a script may make such an exit of what ends an epoch
                        if exit_code(stop):
                            raise  # nobody else need come to the same: it is the end of the job
                        result, ends = _raising(stop), True
            elif not last:
                return
            recovery.complete(self._part, ends)

        recovery.persist(made, recovery.recover)
        recovery.left = self._part
        assert result is not None
        return result()

    def begin(self, adapter: Adapter, version: int, redo: Callable[[], None], resumes: bool = False) -> None:
        """Protect in place a script that has no training function to enter again.

        From here on collectives count as the framework's step only `in_place.inside` its calls. All others
        are recorded, as those of start-up are, and one that a failure interrupts is completed in the next
        epoch: before it is issued again, `in_place.recover` is called. `redo` brings a role from
        `self.version`, which was loaded, to the place where it was interrupted. `resumes`: started again,
        the script goes on from its own newest checkpoint, so that is what the job falls back to.

        Raises ConfigError where the job cannot be protected, FtError where the process is already.
        """
        if self._recovery is not None:
            raise FtError("only one training function, or one engine, can be protected in a process")
        if self._unprotected is not None:
            raise ConfigError(f"this job cannot be protected: {self._unprotected}")
        marks.remove()
        timeline.mark("waiting for the epoch")
        self._shell.handle(e.Begins())
        self._shell.wait_while(StartUp)
        self.comms.startup.training_begins(self.in_place.recover)
        objection = self.groups.start.objection(adapter.replica_group, self.role, version)
        if objection and not self.joining:
            raise ConfigError(objection)
        self._shell.is_at(version)
        self._began_at = version
        self._shell.injector.flip = partial(bit_flip.flip, adapter)
        about_role = adapter, redo, self._about_ahead
        self._recovery = recovery = Recovery(self._shell, self.groups, *about_role)
        if self._plan.detached:
            recovery.prepare()
        about = version, list(adapter.ring), resumes, adapter.replica_group, self._shell.recorded()
        self._shell.handle(e.Registers(m.Registered(*about)))
        recovery.persist(recovery.catch_up, recovery.quiesce)

    def rehearse(self, adapter: Adapter, step: Callable[[], object]) -> None:
        """Before `begin`, where others train meanwhile: do a step without them.

        What is slow the first time (kernels, caches, the optimizer's state) is behind this role when they
        wait for it. A rehearsal that fails does no harm: all that a step changes is loaded afterwards.
        """
        if self.role not in self._plan.ahead:
            return
        try:
            with self.comms.startup.rehearsal(), self.overlay.real():
                step()
        except Exception as error:
            log.warning("role %d could not rehearse a step, and its first is slower: %r", self.role, error)
        adapter.reset()

    @property
    def _plan(self) -> m.WorkerPlan:
        return self._machine.plan

    @property
    def _protected(self) -> Recovery:
        assert self._recovery is not None, "training has not begun"
        return self._recovery

    @property
    def joining(self) -> bool:
        """Whether the state this role goes on from is held elsewhere: its own start-up does not make it."""
        return self._plan.origin in ("memory", "durable")

    @property
    def goes_on_from_memory(self) -> bool:
        """Whether that is in memory, of this same job; what is on storage may be of one before it."""
        return self._plan.origin == "memory"

    @property
    def lean(self) -> bool:
        """Whether a version leaves out what `Adapter.derive` makes of the rest."""
        return self._plan.snapshot == "lean"

    @property
    def started_over(self) -> bool:
        """Whether the job has fallen back to what its script makes when it is started again."""
        return bool(self._plan.restart_epoch)

    def printed(self, text: str, roles: Iterable[int] = ()) -> bool:
        """Whether a worker that has played this role before has printed `text` of late, or any of `roles`.

        As far as its output can be seen here: the job directory is shared, or the node the same.
        """
        since = self._plan.restart_epoch
        others = [path for role in roles for path in played(self.job_dir / "logs", role, since)]
        return printed(text, [*self.predecessors, *others])

    @property
    def protecting(self) -> bool:
        """Whether training is protected, or has begun to be."""
        return self._recovery is not None

    @property
    def is_unprotected(self) -> bool:
        """Whether the script wants no fault tolerance, or cannot have it."""
        return self._unprotected is not None

    def check_epoch(self) -> None:
        """Leave the step when a new epoch was announced, and not in its next collective. Raises
        EpochChanged."""
        self._shell.check_epoch()

    def exchanged(self) -> None:
        """What exchanges have given until here is there, and true. Raises EpochChanged where it may not be.

        On a GPU the host runs ahead of them, and an aborted one leaves garbage. Call it before a script gets
        values that depend on them, unless what it makes of these is done again as well.
        """
        settle()
        self._shell.check_epoch()

    def configure(self, settings: Mapping[str, m.Setting]) -> None:
        """Settings that the script brings (names as in `Settings`). Raises FtError if they cannot be had."""
        imports.check()
        worker, values = self._shell.number, dict(settings)
        reply = self._shell.ask(lambda number: m.Configure(worker, number, values), m.ConfigureAnswer)
        if reply.error:
            raise FtError(reply.error)
        self._shell.handle(e.SettingsBrought(settings))

    def loading(self) -> AbstractContextManager[None]:
        """Wraps the script's reading of its own checkpoint in start-up: a newcomer, whose state comes from
        elsewhere, communicates nothing there, and nobody waits for it."""
        return self.comms.startup.section("load", muted=self.joining)

    def unprotected(self, reason: str = "") -> None:
        """The script wants no fault tolerance, or cannot have it for `reason`: nothing is recorded, and a
        failure costs what the script has not saved itself. The job says so once.

        Where training was protected until now, it is so no longer: what is in memory is of no use to a script
        that goes on with something else.
        """
        if self._unprotected is not None:
            return
        self._unprotected = reason or "its script has asked for no fault tolerance"
        if self._recovery is not None:
            self._recovery.snapshots.wait()
            self._recovery = None
        self.comms.end_startup()
        self.overlay.end()
        self._shell.handle(e.RunsUnprotected(self._unprotected))

    def unprotected_so_far(self, reason: str) -> None:
        """The script seems to train, and has not asked for fault tolerance. The job says so once."""
        self._shell.handle(e.RunsUnprotected(reason, so_far=True))

    def commit_wait(self) -> None:
        """Wait until the newest protected version is staged here and verified at the nodes that keep copies
        of it (DeadPool, section VI-A).

        Called in each step before this role contributes to the barrier, which is any collective that cannot
        end before all roles have entered it; see docs/recovery_rule.md for why not after it. Where a version
        is protected every N steps, copies have until the step that makes the next, but for those of the
        version that an epoch went on from, which its first step waits for. In others only the copy here is
        waited for, as the optimizer would change what it is made of. Raises EpochChanged when a failure comes
        first.
        """
        if self._recovery is None:  # a rehearsal
            return
        if self._recovery.must_commit(self._shell.version + 1):
            self._await_commit()
        else:
            self._recovery.snapshots.wait()
            self._shell.check_epoch()

    @property
    def copying(self) -> bool:
        """Whether the newest version is still copied, which whoever writes to the state now might be in."""
        return self._protected.snapshots.under_way

    def end_copying(self) -> None:
        """Wait until it is not. An error is `commit_wait`'s."""
        self._protected.snapshots.ended()

    @property
    def between_steps(self) -> bool:
        """Whether the state is that of `version`: the optimizer has not begun to change it."""
        return int(self._control[Word.TAG]) == self._shell.version

    def secure(self) -> None:
        """Have this version protected, whichever are, and wait until what this role has of it is: what the
        script does once all meet next must not be undone. Every role calls it at the same place between two
        steps. Raises EpochChanged, and ConfigError where it would have to stage one within a step."""
        if (recovery := self._recovery) is None:
            return
        if recovery.newest != self._shell.version:
            if not self.between_steps:
                raise ConfigError(
                    f"the step after version {self._shell.version} is under way: secure it after `step_done`"
                )
            self._await_commit()
            dist.barrier()  # all have: the version before that may be overwritten
            self.exchanged()
            recovery.stage(self._shell.version)
        self._await_commit()

    def _await_commit(self) -> None:
        """Wait until the newest version that was staged is safe."""
        started = time.monotonic_ns()
        pause = 20e-6
        shell, recovery = self._shell, self._protected
        snapshots = recovery.snapshots
        while self._control[Word.COMMITTED] < recovery.newest:
            shell.check_epoch()
            if (failure := snapshots.failed) is not None:
                raise failure
            time.sleep(pause)
            pause = min(2e-3, pause * 1.5)
        waited = time.monotonic_ns() - started
        self._control[Word.WAITED_NS] += waited
        self._waited_in_step += waited

    def optimizer_begins(self) -> None:
        """The barrier is passed: from here on the state changes. Raises EpochChanged if it was not.

        Called in each step between the barrier and the first change of the state. With NCCL the host runs
        ahead of the exchanges, and an aborted one ends like any other, with garbage: so it is waited for
        them, and only then looked whether the epoch is over. The abort comes after the announcement.
        """
        if self._recovery is None:  # a rehearsal
            return
        if self._control[Word.TAG] != IN_OPTIMIZER:  # some optimizers begin several times in a step
            self.exchanged()
        self._control[Word.TAG] = IN_OPTIMIZER
        self._recovery.snapshots.step_begins()
        self.point("optimizer")

    def step_done(self, dealt: m.Dealt | None = None) -> None:
        """The step is complete on this role: its state is a new version, which is staged at once if it is one
        that is protected.

        Copying goes on behind the next forward pass. `dealt`: for the ledger, the samples of the step (see
        `ft_core.elastic.rules.Deal.ledger_entry`), with policy `shrink` only. One role of each replica group
        gives them: all groups know the same, and the ledger must not lose a step with some.

        Raises ConfigError in the second step where `keep` was called and the adapter lists nothing of it.
        """
        recovery, shell, machine = self._recovery, self._shell, self._machine
        assert recovery is not None
        recovery.calls.step_done()
        recovery.pause.end()
        now = time.monotonic_ns()
        if recovery.step_began:
            self._control[Word.STEP_NS] = now - recovery.step_began
        self._control[Word.DATA_NS] = data_waits.take()
        self._control[Word.COPIES_NS], self._waited_in_step = self._waited_in_step, 0
        recovery.step_began = now
        shell.is_at(shell.version + 1)
        if timeline.running:
            timeline.end(self.role, machine.epoch)
        if machine.reports_step:
            shell.handle(e.StepDone(shell.version))
        protects = recovery.protects(shell.version)
        if protects:
            recovery.stage(shell.version)
        else:
            recovery.snapshots.note(shell.version)
        if dealt is not None and self.groups.elastic:
            self.groups.trained(dealt)
        if protects and shell.version >= machine.hold_at:  # nothing is done again
            recovery.hold()

    def tell_loss(self, loss: float) -> None:
        """The loss of the newest step, where the host knows it: for the job's page, nothing depends on it.

        It is one word that is written: call it whenever the script logs its loss. One role does, or all do
        with the same number.
        """
        self._control[Word.LOSS] = word_of_loss(loss)

    def point(self, name: str) -> None:
        """A place where `--ft-inject` may have this worker or its node killed; `name`: one of
        `ft_core.process.inject.POINTS`."""
        self._shell.point(name)

    @property
    def injecting(self) -> bool:
        """Whether failures are to be injected in this job."""
        return self._shell.injector.armed


def _raising(stop: SystemExit) -> Callable[[], NoReturn]:
    def leave() -> NoReturn:
        raise stop

    return leave

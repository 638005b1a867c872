"""What the main thread of a worker does when an epoch is over, and when the next begins."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from ft_core.adapter import Adapter
from ft_core.errors import CorruptSnapshot, FtError
from ft_core.process.collector import Pause
from ft_core.process.stream import drain, settle
from ft_core.process.timeline import timeline
from ft_core.protocol import messages as m
from ft_core.state.adoption import Snapshots
from ft_core.state.memory import Word
from ft_core.worker import events as e
from ft_core.worker.calls import KeepCalls
from ft_core.worker.data_waits import data_waits
from ft_core.worker.groups import Groups
from ft_core.worker.shell import WorkerShell
from ft_core.worker.states import AtEnd, Holding, Loading, Quiet, Restoring, Stuck, Trained

log = logging.getLogger(__name__)
T = TypeVar("T")


class Ahead:
    """What is done about a worker that starts a role ahead of need. Here: nothing, as it is none."""

    def is_ready(self) -> None:
        """It waits for its state alone."""

    def takes_over(self) -> None:
        """It plays the role now."""


class Recovery:
    """The recoveries of one role whose training is protected. Main thread."""

    def __init__(
        self,
        shell: WorkerShell,
        groups: Groups,
        adapter: Adapter,
        redo: Callable[[], None],
        ahead: Ahead,
    ) -> None:
        """`redo` brings the role from the version that was loaded to where its script is."""
        self._ahead = ahead
        self._shell, self._groups, self._adapter, self._redo = shell, groups, adapter, redo
        self.snapshots = Snapshots(
            shell.machine.role,
            adapter,
            shell.allocate,
            self._staged,
            on_copy=lambda: shell.point("d2h"),
            epoch_is_over=lambda: shell.epoch_is_over,
            verify=shell.machine.plan.verify,
        )
        self.calls = KeepCalls(adapter)
        self.pause = Pause()
        """From the end of an epoch to the end of the next one's first step."""
        self.newest = self.oldest = 0
        """The version that was staged last, or loaded; and the oldest that a recovery may go back to, as all
        roles had committed it before the newest was staged."""
        self._base = 0
        """The version that the epoch went on from."""
        self.left = 0
        """Parts of its script that this worker has left, and cannot go back to."""
        self._begun = False
        """Whether this worker has gone on with its script in any epoch."""
        self._derived = 0
        """The newest epoch in which the state is whole, or was from the beginning."""
        self.step_began = 0
        """In nanoseconds; 0 before there was one."""

    def persist(self, action: Callable[[], T], between: Callable[[], None]) -> T:
        """`action`, and after each epoch change `between` and `action` again."""
        while True:
            try:
                return action()
            except Exception as error:
                if not self.explains(error):
                    raise
            between()

    def explains(self, error: Exception) -> bool:
        """Whether `error` comes of the epoch's end. Drops what the abandoned call has left on its frames."""
        if not self._shell.epoch_is_over:
            return False
        traceback.clear_frames(error.__traceback__)  # the step's tensors hang on them
        return True

    def recover(self) -> None:
        """The epoch is over: take up the next one."""
        self.quiesce()
        self.persist(self.catch_up, self.quiesce)

    def prepare(self) -> None:
        """Have the memory that the gradients take, before anybody counts on a role that is started ahead of
        need."""
        self._adapter.reset()
        self._ahead.is_ready()

    def catch_up(self) -> None:
        """The epoch has begun: to where the script is in it. Raises EpochChanged."""
        self._resume()
        self._redo()

    def derive(self) -> None:
        """Complete the state, once an epoch, before the script goes on. Raises EpochChanged."""
        shell = self._shell
        epoch = shell.machine.epoch
        if self._derived < epoch and self._goes_on:
            timeline.mark("deriving")
            shell.point("derive")
            with torch.no_grad():
                self._adapter.derive()
            settle()  # a weight that was garbage would be in all that is computed until the next exchange
            timeline.mark("step")
            shell.check_epoch()
        self._derived = epoch

    @property
    def _goes_on(self) -> bool:
        """Whether the epoch goes on from a version that was loaded, wherever: the same on all roles."""
        machine = self._shell.machine
        return machine.epoch > 1 or machine.plan.version is not None

    def quiesce(self) -> None:
        """Drop what was under way, and wait for the next epoch."""
        self.pause.begin()
        timeline.mark("unwinding")
        try:
            self.snapshots.wait()
        except Exception:
            log.exception(
                "role %d: staging version %d failed; the copy is not used",
                *(self._shell.machine.role, self._shell.version),
            )
        try:
            drain()  # what an aborted exchange still writes, it writes now
            if self._shell.comms.lacked_memory:
                torch.cuda.empty_cache()
        except RuntimeError as error:
            self._shell.replace(f"its device has failed while an epoch ended: {error}")
        if self._begun:
            self._adapter.reset()
        timeline.mark("waiting for the epoch")
        self._shell.handle(e.Unwound())
        self._shell.wait_while(Quiet)
        if self._shell.machine.parts < self.left:
            self._shell.replace(f"it has left part {self.left} of its script, and all go back to before that")
        self._shell.comms.reset()

    def complete(self, part: int, last: bool) -> None:
        """Wait until every role has come to the end of this part. Raises EpochChanged.

        Who leaves earlier could no longer take part when a peer fails in its last collective.
        """
        self.snapshots.wait()
        self.pause.end()  # no step may follow
        self._shell.handle(e.PartDone(part, self._shell.version, last))
        if isinstance(self._shell.wait_while(AtEnd), Trained):
            self._shell.comms.startup.training_ends()
        else:
            self._shell.check_epoch()

    def protects(self, version: int) -> bool:
        """Whether that version is one of those that are protected: the same on all roles."""
        return (version - self._base) % self._shell.machine.plan.every == 0

    def must_commit(self, version: int) -> bool:
        """Whether the step that makes that version waits until the newest protected one is safe elsewhere.

        The next one would overwrite the one before; and what an epoch went on from may be in one place."""
        return self.protects(version) or version == self._base + 1

    def stage(self, version: int) -> None:
        """Begin to copy the state: all roles have committed the newest version before this one."""
        self.oldest, self.newest = self.newest, version
        self.snapshots.stage(version)

    def hold(self) -> None:
        """A replica group comes back: wait for that here, where nothing is under way that would be lost."""
        self.pause.begin()
        self._shell.handle(e.StepSafe(self._shell.version))
        self._shell.wait_while(Holding)

    def _resume(self) -> None:
        shell, machine = self._shell, self._shell.machine
        self.pause.begin()  # a newcomer has not been in `quiesce`
        self._groups.begin(self._adapter.replica_group)
        if machine.epoch > 1:
            shell.point("recovery")
        timeline.mark("waiting for state")
        apart = machine.plan.detached
        state = shell.wait_while(Restoring)
        if apart:
            self._ahead.takes_over()
        shell.check_epoch()
        assert isinstance(state, Loading), state
        timeline.mark("loading")
        loaded = self._load(state.restore)
        if self._groups.elastic:
            self._groups.fill_the_ledger(self._adapter)
        timeline.mark("step")
        if not loaded:
            self.snapshots.stage(shell.version)
        self._begun = True
        self._base = self.newest = shell.version
        self.oldest = min(self.oldest, self.newest)
        shell.is_at(shell.version)
        self.step_began = time.monotonic_ns()
        data_waits.take()  # what was waited for before is no part of this step
        shell.handle(e.Loaded(shell.version, loaded))

    def _load(self, restore: m.Restore) -> bool:
        """Whether there was anything of this role's own."""
        shell, role = self._shell, self._shell.machine.role
        adopted = (away for away, adopter in shell.machine.plan.adopted.items() if adopter == role)
        held = self.snapshots.adopt(adopted)
        parts = [part for part in restore.parts if part.role in held]
        without = held - {role, *(part.role for part in parts)}
        if without and (shell.version or without & set(self._groups.start.present)):
            raise FtError(f"role {role} has no copy of what roles {sorted(without)} had alone")
        self._load_parts(parts, restore.version)
        if restore.version is None or all(part.role != role for part in parts):
            return False
        shell.version = shell.control[Word.STAGED] = restore.version
        return True

    def _load_parts(self, parts: list[m.CopyHere], version: int | None) -> None:
        shell = self._shell
        for part in parts:
            assert version is not None
            timeline.facts["fetch_s"] = timeline.facts.get("fetch_s", 0) + part.fetch_s
            try:
                self.snapshots.load(part, version)
            except CorruptSnapshot as error:
                # The copy is struck off, and the controller decides again without it.
                shell.handle(e.FoundCorrupt(part.role, part.slot, str(error)))
                shell.wait_while(Stuck)
                shell.check_epoch()

    def _staged(self, role: int, version: int) -> None:
        sums: dict[str, str] = {}
        if role == self._shell.machine.role:
            self._shell.control[Word.STAGED] = version
            sums = self.snapshots.sums
        self._shell.send(m.Staged(role, version, sums))

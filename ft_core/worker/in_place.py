"""What the adapter of a framework meets of a worker whose script is protected as it is: it does not unwind.

The script goes on through a recovery, from where it was. A call of the framework's that a failure interrupts
is done again as a whole (`inside`). What the script communicates between these calls is on record, as in
start-up: an operation is completed in the next epoch, and a newcomer, whose script passes the steps that are
done, has the results that its predecessor had (`ft_core.comm.startup`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import torch

from ft_core.comm.startup import Startup
from ft_core.errors import FtError
from ft_core.overlay import Overlay
from ft_core.protocol import messages as m
from ft_core.protocol.groups import parse
from ft_core.state.envelope import decode
from ft_core.worker.groups import Groups
from ft_core.worker.recovery import Recovery
from ft_core.worker.shell import WorkerShell

log = logging.getLogger(__name__)


class Progress(NamedTuple):
    """How far a role is that trains."""

    version: int
    """That all roles have done."""
    envelope: Any
    """The role's own, of that version or the next."""
    tensor: bytes
    """What was asked for of it; empty: it is not there, or too large."""


class InPlace:
    """One worker's, see `Session.in_place`. Main thread."""

    def __init__(
        self, shell: WorkerShell, groups: Groups, overlay: Overlay, recovery: Callable[[], Recovery]
    ) -> None:
        """`recovery`: that of the training that is protected, once it is."""
        self._shell, self._groups, self._overlay, self._recovery = shell, groups, overlay, recovery

    # -- recoveries --------------------------------------------------------------------------------

    def inside(self) -> AbstractContextManager[None]:
        """Wraps a call of the framework's that is done again from its beginning when a failure interrupts it.

        Its collectives are not recorded; they raise EpochChanged when the epoch is over.
        """
        return self._startup.paused()

    def interrupted(self, error: Exception) -> bool:
        """Whether `error` comes of the epoch's end, and `recover` is due. Drops what the abandoned call has
        left on its frames."""
        return self._recovery().explains(error)

    def recover(self) -> None:
        """The epoch is over: take up the next one, outside the framework's calls."""
        self._recovery().recover()

    def derive(self) -> None:
        """First in the `redo` that was given to `Session.begin`: complete what was loaded. Raises
        EpochChanged."""
        with self.inside():
            self._recovery().derive()

    def replace_worker(self, reason: str) -> NoReturn:
        """This process cannot get to where its peers are: end it, so that another takes its role over."""
        self._shell.replace(reason)

    # -- a newcomer's way --------------------------------------------------------------------------

    def progress_of_others(self, tensor: str = "") -> Progress | None:
        """Before `Session.begin`, where others train meanwhile: how far the role is that stands for this one.

        The script can be brought to that version without them: of what it does outside of the framework's
        calls until there, the results are on record. `tensor`: one in its snapshots that is wanted as well.
        None where nobody trains without this role.
        """
        machine = self._shell.machine
        if (holder := machine.plan.ahead.get(machine.role)) is None:
            return None
        try:
            found = self._shell.ask(lambda number: m.AskProgress(number, holder, tensor), m.Progress)
            envelope = decode(found.envelope.encode())
        except (FtError, ValueError) as error:
            log.info("role %d: %s; its script gets to the others with the epoch to come", machine.role, error)
            return None
        self._groups.learn()
        self._shell.comms.learn({parse(text): (count, holder) for text, count in found.counts.items()})
        return Progress(found.version - 1, envelope, found.tensor)

    def passed(self) -> None:
        """A call of the script was answered from the record: so others see that it gets on."""
        self._shell.passed()
        self._overlay.gets_on()

    def cannot_pass(self, what: str) -> NoReturn:
        """The script does, on its way through steps that are done, `what` cannot be passed over. Nor can
        another's, so the job begins anew. Any thread."""
        self._shell.replace(f"in steps that are done {what}, which cannot be passed over", m.Fault.DIVERGED)

    # -- what the script communicates between the framework's calls --------------------------------

    @property
    def _startup(self) -> Startup:
        return self._shell.comms.startup

    @property
    def issued(self) -> int:
        """How many operations this process has issued, those of the framework's calls included."""
        return sum(self._shell.comms.counts.values())

    def reached(self, step: int) -> None:
        """The script has done `step` steps: what it communicates is on record from there on."""
        self._shell.comms.reached(step)

    def operations(self) -> dict[str, int]:
        """What is on record since then, as `were_done` takes it."""
        return self._shell.comms.operations()

    def were_done(self, operations: Mapping[str, int]) -> None:
        """The script is where another was when `operations` was called. Raises ReplayMismatch."""
        self._startup.were_done(operations)

    def newcomers_begin_at(self, step: int) -> None:
        """The script's own checkpoint of that step is complete, and its newcomers load it."""
        self._shell.comms.newcomers_begin_at(step)

    def weights(self) -> AbstractContextManager[None]:
        """Wraps exchanges of start-up whose results are overwritten by a restore, whatever type they have."""
        return self._startup.weights()

    def used(self) -> AbstractContextManager[None]:
        """Wraps exchanges of start-up whose results are used at once: no restore overwrites them."""
        return self._startup.used()

    def has_loaded(self) -> None:
        """A newcomer's script has loaded a checkpoint in start-up, which need not be its peers'."""
        self._startup.has_loaded()

    @property
    def goes_by(self) -> str:
        """The first operation after `has_loaded` of which the script has its peers' result; empty: none."""
        return self._startup.goes_by

    def when_it_tells(self, look: Callable[[list[torch.Tensor]], None]) -> None:
        """Have `look` called with what the script is about to tell its peers there."""
        self._startup.gives = look

"""Which replica groups take part in a worker's steps, as its plans say (docs/elastic.md)."""

from __future__ import annotations

import logging

from ft_core.adapter import Elastic, ReplicaGroup
from ft_core.elastic.rules import AHEAD, Membership, Start, lr_factor, tellers
from ft_core.protocol.messages import Dealt, Trained, WorkerPlan
from ft_core.worker.shell import WorkerShell

log = logging.getLogger(__name__)


class Groups:
    """Those of the whole job, as one role knows them."""

    def __init__(self, shell: WorkerShell) -> None:
        self._shell = shell
        self.membership = Membership(1)
        """Which replica groups take part in which step."""
        self._own = 0
        """This role's."""

    @property
    def _plan(self) -> WorkerPlan:
        return self._shell.machine.plan

    @property
    def taking_part(self) -> tuple[int, ...]:
        """The groups that exchange gradients in the step under way."""
        return self.membership.taking_part(self._shell.version + 1)

    @property
    def contributing(self) -> tuple[int, ...]:
        """The groups whose gradients count in the step under way."""
        return self.membership.contributing(self._shell.version + 1)

    def learn(self) -> None:
        """The plan is that of an epoch which others have begun."""
        self.membership = Membership.of(self._plan.membership)

    def begin(self, own: ReplicaGroup) -> None:
        """An epoch begins, for a role that has this replica group."""
        before, self._own = self.membership, own.index
        self.learn()
        if not self.membership.groups:  # the plan was made before the roles had told of their groups
            self.membership = self.start.membership(own.groups)
        machine = self._shell.machine
        if self.membership != before and machine.role == min(set(range(machine.world_size)) - self.absent):
            self._say_what_changes(self._plan.version or 0)

    @property
    def elastic(self) -> bool:
        """Whether groups may leave (policy `shrink`)."""
        return self._plan.policy == "shrink"

    @property
    def absent(self) -> frozenset[int]:
        """Roles whose groups are away."""
        return frozenset(self._plan.absent)

    @property
    def start(self) -> Start:
        """The roles that the job began with."""
        began = self._plan.began_with
        return Start(began.roles, began.stages, began.there)

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied by in the step under way: 1.0 while all groups train."""
        return self._lr_factor(self._shell.version + 1)

    def _lr_factor(self, step: int) -> float:
        live = len(self.membership.contributing(step))
        return lr_factor(self._plan.lr_intervention, live, self.membership.groups)

    def trained(self, dealt: Dealt) -> None:
        """A step is done, with these samples."""
        version = self._shell.version
        if self._own in tellers(self.membership.taking_part(version)):
            self._tell(version, dealt)

    def fill_the_ledger(self, adapter: Elastic) -> None:
        """Tell again of steps that the ledger does not have: who was to tell of them may be lost, all at
        once. The state of the version that the epoch begins from is there."""
        version, entered = self._plan.version or 0, self._plan.ledger_through
        if entered < version and self._own in tellers(self.membership.taking_part(version + 1)):
            for step, dealt in adapter.dealt_after(entered, self.membership):
                self._tell(step, dealt)

    def _tell(self, step: int, dealt: Dealt) -> None:
        machine = self._shell.machine
        self._shell.send(Trained(machine.epoch, self._plan.version, step, machine.role, dealt))

    def _say_what_changes(self, version: int) -> None:
        """The log says what becomes of the learning rate."""
        full = self.membership.groups
        for step in range(version + 1, version + AHEAD + 2):
            live = len(self.membership.contributing(step))
            if live != len(self.membership.contributing(step - 1)):
                log.warning(
                    "from step %d on %d of %d replica groups train: learning rate x %.4f (%s)",
                    *(step, live, full, self._lr_factor(step), self._plan.lr_intervention),
                )

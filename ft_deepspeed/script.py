"""Where a script is on its way through the steps, and what goes with a version of it."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import Counter
from enum import Enum, auto
from typing import Any

from ft_core.kept import Kept
from ft_core.state import rng
from ft_core.worker.session import Session
from ft_deepspeed import counters
from ft_deepspeed.calls import Call, Forward, Load
from ft_deepspeed.dealing import Dealing
from ft_deepspeed.draws import Draws
from ft_deepspeed.loads import Loads
from ft_deepspeed.made_up import MadeUp
from ft_deepspeed.module_state import ModuleState
from ft_deepspeed.own_code import scripts
from ft_deepspeed.reference import References
from ft_deepspeed.results import Results
from ft_deepspeed.trainer import TrainerLoop
from ft_deepspeed.zero import inner_optimizer


class Phase(Enum):
    """Where the script is."""

    STARTUP = auto()
    """It has made no call yet."""
    BEGINNING = auto()
    """It has made its first call; what state the engine goes on from is being settled."""
    CATCHING_UP = auto()
    """A newcomer's: the engine is further on, and calls are answered from the record."""
    LIVE = auto()
    """Where the engine is."""
    RETIRED = auto()
    """It trains something else by now, and nothing is protected any more."""


class Script:
    """The script that trains with one engine, as far as its calls tell of it."""

    module: ModuleState
    """What the model has in its attributes, from the first call on."""

    def __init__(self, engine: Any, session: Session, references: References) -> None:
        """`references`: engines beside it that train nothing."""
        self.engine, self.session, self.references = engine, session, references
        self.phase = Phase.STARTUP
        self.position = 0
        """Steps that it has done, which on a newcomer is less than the engine has; see `reached`."""
        self.began_at = 0
        """The step after which it made its first call."""
        self.first = 0
        """The same of the first worker of this role whose files this one goes on with."""
        self.since = math.inf
        """When it made its first call, in seconds since 1970."""
        self.machine = os.uname().nodename
        """Where that was."""
        self.whole = True
        """Whether it goes through all steps."""
        self._forwards: list[weakref.ref[Forward]] = []
        self.touched = False
        """Whether its newest `backward` has come to what was answered from the record."""
        self.results = Results()
        self.draws = Draws(self.steps_done)
        self.loads = Loads(self.steps_done)
        self.made_up = MadeUp(engine.module, self.steps_done, session.in_place.cannot_pass)
        self.kept = Kept()
        """What it has named (`ft_core.kept`), as it was when its newest step ended."""
        self.loop: TrainerLoop | None = None
        """A framework's, whose newcomers need not pass all steps."""
        self.dealing: Dealing | None = None
        """Who deals its samples, where replica groups may be away."""
        self.leads_group = False
        """Whether it tells of its replica group's samples."""
        self._counted: Counter[str] = Counter()

    def begin(self) -> None:
        """It makes its first call: what came before was start-up."""
        self.phase = Phase.BEGINNING
        rng.find(scripts(self.engine.module))
        self.module = ModuleState(self.engine.module, inner_optimizer(self.engine), self.engine.lr_scheduler)
        self.kept = Kept.capture()
        self.began_at, self.since = self.engine.global_steps, time.time()
        self.first = self.began_at
        self.reached(self.began_at)

    def reached(self, step: int) -> None:
        """It has done so many steps."""
        self.position = step
        self._counted.clear()
        self.session.in_place.reached(step)

    def number(self, call: Call) -> int:
        """Which of its kind this call is since the newest step."""
        self._counted[call.kind] += 1
        return self._counted[call.kind] - 1

    def counted(self) -> dict[str, int]:
        """How many calls of each kind there were since the newest step."""
        return dict(self._counted)

    @property
    def forwards(self) -> list[Forward]:
        """Forward passes that no backward pass has gone through yet, and one still can."""
        found = [call for reference in self._forwards if (call := reference()) is not None]
        return [call for call in found if call.boundary is not None]

    @forwards.setter
    def forwards(self, calls: list[Forward]) -> None:
        self._forwards = [weakref.ref(call) for call in calls]

    def goes_to(self, position: int, counted: dict[str, int]) -> None:
        """It is where another was that had counted so many calls."""
        self.whole = False
        self.reached(position)
        self._counted.update(counted)

    def expected(self, call: Call, numbers: counters.Numbers, ends: bool) -> counters.Numbers:
        """What a call leaves in the engine's counters, of which these are the numbers before it, if nothing
        special happens. `ends`: it ends a step."""
        return numbers if isinstance(call, Load) else counters.expected(numbers, self.engine, ends)

    def steps_done(self) -> int:
        """By the script; -1: in start-up."""
        return -1 if self.starting else self.position

    @property
    def starting(self) -> bool:
        """Whether it has made no call yet."""
        return self.phase is Phase.STARTUP

    @property
    def live(self) -> bool:
        """Whether it is where the engine is; else it is a newcomer's, and what it has is made up."""
        return self.phase is Phase.LIVE

    @property
    def began(self) -> bool:
        """Whether the version is what this worker's script began with, and not the outcome of a step."""
        return self.session.version == self.began_at

    def deal(self) -> Any:
        """The deal of the samples, for the envelope."""
        return self.dealing.state(self.session.version) if self.dealing is not None else None

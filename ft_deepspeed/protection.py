"""A DeepSpeed engine whose calls survive failures, in a script that knows nothing of it.

On a survivor, a call that a failure interrupts is recovered in place: the engine goes back to the version
that the controller decided on, the calls since then are made again, and last the one that was interrupted
(`live`). On a newcomer, whose script runs from its top, calls of steps that are done are only counted and
answered (`newcomer`) until it has come to where its peers are.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from ft_core.adapter import ReplicaGroup
from ft_core.errors import ConfigError
from ft_core.kept import Kept
from ft_core.worker.session import Session
from ft_deepspeed import boundary, checkpoints, patched
from ft_deepspeed.calls import Call
from ft_deepspeed.dealing import POLICY, Dealing
from ft_deepspeed.exchange import Exchange
from ft_deepspeed.guards import Guards
from ft_deepspeed.live import Live
from ft_deepspeed.module_state import ModuleState
from ft_deepspeed.newcomer import Newcomer
from ft_deepspeed.protected_state import ProtectedState
from ft_deepspeed.reference import IN_PARTS, References
from ft_deepspeed.script import Phase, Script
from ft_deepspeed.state import DeepSpeedAdapter
from ft_deepspeed.trainer import TrainerLoop

log = logging.getLogger(__name__)


class Protection:
    """Stands between the script and one engine: says who makes a call of the script's, and what a recovery
    does."""

    def __init__(self, engine: Any, session: Session, shrink: bool, references: References) -> None:
        """`shrink`: others go on when a replica group is lost, if this engine's state allows it.
        `references`: engines beside it that train nothing.

        Raises ConfigError when this engine cannot be protected; it is untouched then.
        """
        if shrink and references.in_parts:
            log.warning("%s %s, so the job waits when one is lost", POLICY, IN_PARTS)
            shrink = False
        adapter = DeepSpeedAdapter(engine, session.lean)
        if engine.zero_optimization_stage() == 3 and session.groups.absent and not session.joining:
            raise ConfigError(
                "ZeRO stage 3 shards the weights from the start on, so a job cannot start without some "
                "replica groups: give --nnodes one number"
            )
        self._engine, self._session = engine, session
        self._script = script = Script(engine, session, references)
        self._state = ProtectedState(adapter, script, shrink, self._interrupted)
        self._live = Live(script, self._state)
        self._newcomer = Newcomer(script, self._state, self._live, self._enter, self._goes_on)
        session.in_place.when_it_tells(lambda tensors: script.made_up.given(tensors, "other ranks"))
        engine.ft_protection = self
        boundary.install(engine, session)
        script.leads_group = 0 in adapter.ring
        if self._state.replica_group.may_leave:
            self._elastic(adapter.replica_group, adapter.ring)
        elif shrink:
            log.warning("%s: %s, so the job waits when one is lost", POLICY, adapter.objection)
        guards = Guards(script, self)
        guards.install()
        if "transformers.trainer" in sys.modules:
            script.loop = TrainerLoop(self, session, engine.module)
            for patch in patched.TRAINER_SAVES:
                patch.wrap(guards.save)
        if "accelerate.accelerator" in sys.modules:
            checkpoints.saves_again(session)
        references.protection = self
        session.point("startup")

    def _elastic(self, group: ReplicaGroup, ring: tuple[int, ...]) -> None:
        engine, script = self._engine, self._script
        if any(getattr(module, "sparse", False) for module in engine.module.modules()):
            raise ConfigError(f"{POLICY} cannot average sparse gradients: give the embeddings sparse=False")
        Exchange(engine, self._session, group.index)
        script.dealing = Dealing(
            self._session,
            group,
            engine.gradient_accumulation_steps(),
            position=lambda: engine.global_steps if script.starting else script.position,
            training=lambda: engine.module.training,
        )
        checkpoints.complete(engine, self._session, ring, script.deal)

    # -- the script's calls --------------------------------------------------------------------

    @property
    def performing(self) -> bool:
        """Whether a call passes straight through: the engine calls itself, or nothing is protected, or it is
        within torch.func. Each tensor that is made there is wrapped: nothing can be noted, or begun."""
        if self._live.performing or self._script.phase is Phase.RETIRED:
            return True
        if torch._C._functorch.peek_interpreter_stack() is None:
            return False
        if self._script.phase is Phase.CATCHING_UP:
            self._session.in_place.cannot_pass("the engine is called within torch.func")
        return True

    def call(self, call: Call) -> Any:
        """Make a call of the script's, or answer it."""
        self._begin()
        script = self._script
        script.draws.calls()
        script.made_up.calls()
        maker = self._newcomer.answer if script.phase is Phase.CATCHING_UP else self._live.make
        result = maker(call)
        script.draws.returns()
        script.made_up.returns()
        return result

    def beside(self, call: Call) -> Any:
        """Make a call of an engine that trains nothing, beside this one's."""
        return call.method(*call.args, **call.kwargs) if self.performing else self.call(call)

    def retires(self, why: str) -> bool:
        """The script is about to train something else, which nothing protects; `why`: for the user.

        Returns False, and goes on, where it has not trained with this engine yet. A failure from here on
        costs what the script has not saved itself.
        """
        script = self._script
        if script.phase is Phase.RETIRED:
            return True
        if script.starting and self._engine.global_steps:
            self._begin()  # it goes on from a checkpoint, and is done
        if script.phase is Phase.CATCHING_UP:
            self._session.in_place.cannot_pass("deepspeed.initialize is called again")
        if not script.live or not script.position or script.dealing is not None:
            return False
        self._newcomer.keep_up()
        self._session.unprotected(why)
        script.phase = Phase.RETIRED
        return True

    def _begin(self) -> None:
        """At the first call: what came before it was start-up."""
        if not self._script.starting:
            return
        self._script.begin()
        self._live.begin()
        self._newcomer.begin()
        if not self._newcomer.passes_ahead():
            if not self._session.joining:
                self._state.compare()
            self._enter()

    def _enter(self) -> None:
        """Take part in the epochs from here on."""
        script = self._script
        self._session.begin(self._state, script.position, script.made_up.after(self._redo))

    # -- recovery ------------------------------------------------------------------------------

    def _interrupted(self) -> None:
        """An abandoned call is to be dropped: the script must find everything as it left it."""
        self._script.made_up.rests()
        (self._newcomer if self._script.phase is Phase.CATCHING_UP else self._live).interrupted()

    def _redo(self) -> None:
        """State `session.version` was loaded: get to where the script is."""
        script, version = self._script, self._session.version
        ahead = version > script.position and self._live.is_between
        behind = script.phase is Phase.CATCHING_UP or ahead
        if objection := (self._newcomer if behind else self._live).objection(version):
            self._session.in_place.replace_worker(objection)
        self._session.in_place.derive()
        script.references.reset()
        if behind:
            self._newcomer.follow(version)
        else:
            self._live.redo(version)
            self._goes_on()

    def _goes_on(self) -> None:
        """The script is where the engine is: give a newcomer's what its predecessor had kept there.

        That is what it was when the step ended. A script that has come here by its own checkpoint is further:
        it has done what comes after that step, and has loaded what it needs.
        """
        script, session, state = self._script, self._session, self._state
        if not script.live and (loaded := state.loaded) is not None:
            if loaded["began"] or script.position > script.began_at:
                script.made_up.seen(state.kept.apply)
            state.kept = Kept()
            if objection := script.references.objection(loaded.get("references", [])):
                session.in_place.cannot_pass(objection)
            script.first = loaded.get("first", script.began_at)
            if script.first != script.began_at:
                script.since = loaded.get("since", script.since)
                script.machine = loaded.get("machine", script.machine)
            goes_by = session.in_place.goes_by
            if script.whole and script.first != script.began_at and goes_by:
                session.in_place.cannot_pass(
                    f"it goes by {goes_by}, of peers that began with step {script.first}, where it has "
                    f"begun with its checkpoint of step {script.began_at}"
                )
            session.overlay.arrives()
            script.made_up.arrives()
        state.arrived()
        script.phase = Phase.LIVE

    # -- a framework's loop (`trainer.Loop`), and what else asks for this by the engine ---------------

    def top(self) -> dict[str, Any]:
        """Where the script is between two calls."""
        script = self._script
        return {
            "position": script.position,
            "counted": script.counted(),
            "operations": self._session.in_place.operations(),
            "draws": script.draws.place(),
            "state": self._state.between(),
        }

    def begin_at_top(self) -> Any:
        """Training begins, on all roles at the same place. Of a newcomer returns the envelope of the version
        that its script is to come to; None where it is there, or is to go through all steps."""
        self._begin()
        return self._newcomer.target

    def goes_to(self, top: dict[str, Any]) -> None:
        """The script is where another was when `top` was called."""
        self._newcomer.goes_to(top)

    @property
    def position(self) -> int:
        """Steps that the script has done."""
        return self._script.position

    @property
    def starting(self) -> bool:
        """Whether the script has made no call yet."""
        return self._script.starting

    @property
    def live(self) -> bool:
        """Whether the script is where the engine is."""
        return self._script.live

    @property
    def dealing(self) -> Dealing | None:
        """Who deals the script's samples, where replica groups may be away."""
        return self._script.dealing

    @property
    def module(self) -> ModuleState:
        """What the model has in its attributes."""
        return self._script.module

    def point(self, name: str) -> None:
        """A place where a failure may be injected."""
        self._session.point(name)

"""A DeepSpeed engine whose calls survive failures, in a script that knows nothing of it.

On a survivor, a call that a failure interrupts is recovered in place: the engine goes back to the version
that the controller decided on, the calls since then are made again, and last the one that was interrupted.
On a newcomer, whose script runs from its top, calls of steps that are done are only counted and answered
(`catch_up`) until it has come to where its peers are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ft_core.adapter import ReplicaGroup
from ft_core.errors import ConfigError, EpochChanged
from ft_core.kept import Kept
from ft_core.patching import replaced
from ft_core.process.timeline import timeline
from ft_core.state import rng
from ft_core.worker.session import Session
from ft_deepspeed import boundary, checkpoints, counters, patched
from ft_deepspeed.calls import (
    RETURNED,
    Backward,
    Batch,
    Call,
    CannotRepeat,
    Direct,
    Forward,
    Load,
    Save,
    ScriptPart,
    Step,
)
from ft_deepspeed.catch_up import CatchUp
from ft_deepspeed.context import Context
from ft_deepspeed.dealing import POLICY, Dealing
from ft_deepspeed.draws import Draws
from ft_deepspeed.exchange import Exchange
from ft_deepspeed.gradients import CHANGED, WRITTEN, Gradients, Weights
from ft_deepspeed.made_up import MadeUp
from ft_deepspeed.module_state import ModuleState, scripts
from ft_deepspeed.protected_state import ProtectedState
from ft_deepspeed.reference import IN_PARTS, References
from ft_deepspeed.results import NotOnRecord, Results
from ft_deepspeed.resumption import Resumption
from ft_deepspeed.state import DeepSpeedAdapter
from ft_deepspeed.tape import Tape
from ft_deepspeed.trainer import TrainerLoop
from ft_deepspeed.zero import inner_optimizer

log = logging.getLogger(__name__)

_POINTS = {
    "forward": "forward",
    "train_batch": "forward",
    "evaluation": "evaluate",
    "eval_batch": "evaluate",
    "save": "save",
}
"""Kind of call -> where a failure may be injected when it begins."""

Method = Callable[..., Any]

_NEAR = 8
"""Steps that a newcomer's script passes with others waiting, rather than ask once more how far they are."""


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


class Protection:
    """Stands between the script and one engine. The engine's public methods are replaced by guarded ones."""

    def __init__(self, engine: Any, session: Session, shrink: bool, references: References) -> None:
        """`shrink`: others go on when a replica group is lost, if this engine's state allows it.
        `references`: engines beside it that train nothing.

        Raises ConfigError when this engine cannot be protected; it is untouched then.
        """
        self._engine, self._session, self.references = engine, session, references
        if shrink and references.in_parts:
            log.warning("%s %s, so the job waits when one is lost", POLICY, IN_PARTS)
            shrink = False
        state = DeepSpeedAdapter(engine, session.lean)
        self._adapter = ProtectedState(state, self, shrink, lambda: session.version)
        if engine.zero_optimization_stage() == 3 and session.groups.absent and not session.joining:
            raise ConfigError(
                "ZeRO stage 3 shards the weights from the start on, so a job cannot start without some "
                "replica groups: give --nnodes one number"
            )
        self.results = Results()
        self.draws = Draws(self._steps_done)
        self._made_up = MadeUp(engine.module, self._steps_done, session.cannot_pass)
        session.comms.startup.gives = lambda tensors: self._made_up.given(tensors, "other ranks")
        self._phase = Phase.STARTUP
        self._tape = Tape()
        self._pending: Call | None = None
        """The script's call that is under way, or was interrupted."""
        self._outside: Context | None = None
        """Where a failure has interrupted the script between two calls, as it left the engine."""
        self._performing = self._retired = False
        """Whether a call is being made: then the engine calls itself. And whether nothing is protected any
        more."""
        self._began_at = 0
        """The step after which the script made its first call."""
        self.module: ModuleState
        self._gradients: Gradients
        self._weights: Weights
        """Set, all three, in `_begin`."""
        self.first = 0
        """The same of the first worker of this role whose files this one goes on with."""
        self.kept = Kept()
        """What the script has named (`ft_core.kept`), as it was when its newest step ended."""
        self._position = 0
        """Steps that the script has done, which on a newcomer is less than the engine has; see `_reached`."""
        self._counted: Counter[str] = Counter()
        self._forwards: list[Forward] = []
        self._whole = True
        """Whether the script goes through all steps."""
        self._passes_from = 0
        """Where a newcomer's script is when it begins to pass steps."""
        self._touched = False
        """Whether the newest `backward` has come to what was answered from the record."""
        self._catch_up: CatchUp | None = None
        """While the phase is that."""
        self._sample: Forward | None = None
        self._gap = math.inf
        """Steps that this role's script was behind when it began to pass them, see `_passes_ahead`."""
        self._script: Any = None
        """Counters, random states and schedules where a newcomer's script is: the engine is further on."""
        engine.ft_protection = self
        boundary.install(engine, session)
        self.dealing: Dealing | None = None
        self.leads_group = 0 in state.ring
        if self._adapter.replica_group.may_leave:
            self._elastic(state.replica_group, state.ring)
        elif shrink:
            log.warning("%s: %s, so the job waits when one is lost", POLICY, state.objection)
        self._resumption = Resumption(engine, session)
        for patch, make in zip(patched.CALLS, (Forward, self._backward, Step), strict=True):
            patch.wrap(self._guard(make), of=engine)
        for patch in patched.BATCHES:
            patch.wrap(self._guard(Batch), of=engine)
        for patch in patched.SAVES:
            patch.wrap(self._guard(Save), of=engine)
        patched.BACKWARD.wrap(self._guard_direct_backward)
        self.loop: TrainerLoop | None = None
        if "transformers.trainer" in sys.modules:
            self.loop = TrainerLoop(self, session, engine.module)
            for patch in patched.TRAINER_SAVES:
                patch.wrap(self._guard_save)
        if "accelerate.accelerator" in sys.modules:
            checkpoints.saves_again(session)
        patched.LOAD.wrap(self._guard_load, of=engine)
        references.protection = self
        session.point("startup")

    def _steps_done(self) -> int:
        """By the script; -1: in start-up."""
        return -1 if self._phase is Phase.STARTUP else self._position

    def _elastic(self, group: ReplicaGroup, ring: tuple[int, ...]) -> None:
        engine = self._engine
        if any(getattr(module, "sparse", False) for module in engine.module.modules()):
            raise ConfigError(f"{POLICY} cannot average sparse gradients: give the embeddings sparse=False")
        Exchange(engine, self._session, group.index)
        self.dealing = Dealing(
            self._session,
            group,
            engine.gradient_accumulation_steps(),
            position=lambda: engine.global_steps if self._phase is Phase.STARTUP else self._position,
            training=lambda: engine.module.training,
        )
        checkpoints.complete(engine, self._session, ring, self.deal)

    # -- the script's calls --------------------------------------------------------------------

    def _guard(self, make: Callable[..., Call]) -> Callable[[Method], Method]:
        def guarding(method: Method) -> Method:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                if self._performing:  # the engine calls itself
                    return method(*args, **kwargs)
                self._begin()
                return self._call(make(self._engine, method, args, kwargs))

            return guarded

        return guarding

    def _guard_load(self, load: Method) -> Method:
        engine, session = self._engine, self._session

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if self._performing:
                return load(*args, **kwargs)
            if self._phase is not Phase.STARTUP:
                if self.dealing is not None:
                    raise ConfigError(
                        f"{POLICY} deals the samples of a job that goes forward: call engine.load_checkpoint "
                        "before the first step"
                    )
                return self._call(Load(engine, load, args, kwargs))
            # A newcomer may find a checkpoint that was not there when its peers began. Its script goes on
            # from that step and is answered from there; the state itself comes from memory.
            with session.comms.startup.section("load", muted=session.joining):
                path, client_state = load(*args, **kwargs)
            if session.joining and path is not None:
                session.comms.startup.has_loaded()
            self._resumption.loaded(load, *args, **kwargs)
            deal = client_state.pop(checkpoints.KEY, None) if client_state else None
            if self.dealing is not None and path is not None:
                self.dealing.resume(engine.global_steps, deal)
            return path, client_state

        return load_checkpoint

    def _guard_save(self, method: Method) -> Method:
        """Guard a way to save of a class that trains with this engine."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._performing or self._phase is Phase.STARTUP:
                return method(*args, **kwargs)
            return self._call(Save(self._engine, method, args, kwargs))

        return guarded

    def _guard_direct_backward(self, backward: Method) -> Method:
        """`loss.backward()` of what comes from the engine's outputs."""

        def guarded(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            self._touched = False
            kwargs = {"retain_graph": retain_graph, "create_graph": create_graph, **kwargs}
            if self._performing:
                backward(tensors, grad_tensors, *args, **kwargs)
                return
            losses = [t for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor)]
            script = ScriptPart(losses, self._forwards, self._engine)
            if not script.forwards:
                backward(tensors, grad_tensors, *args, **kwargs)
                if not self._touched:
                    return
            call = Direct(self._engine, backward, tensors, script, (grad_tensors, *args), kwargs)
            if not call.retained:
                self._forwards = [f for f in self._forwards if f not in script.forwards]
            self._call(call)

        return guarded

    def _backward(self, engine: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Backward:
        call = Backward(engine, method, args, kwargs, self._forwards)
        if not kwargs.get("retain_graph"):
            self._forwards = []
        return call

    def beside(self, call: Call) -> Any:
        """Make a call of an engine that trains nothing, beside this one's."""
        if self._performing:
            return call.execute()
        self._begin()
        return self._call(call)

    def retires(self, why: str) -> bool:
        """The script is about to train something else, which nothing protects; `why`: for the user.

        Returns False, and goes on, where it has not trained with this engine yet. A failure from here on
        costs what the script has not saved itself.
        """
        if self._retired:
            return True
        if self._phase is Phase.STARTUP and self._engine.global_steps:
            self._begin()  # it goes on from a checkpoint, and is done
        if self._phase is Phase.CATCHING_UP:
            self._session.cannot_pass("deepspeed.initialize is called again")
        if self._phase is not Phase.LIVE or not self._position or self.dealing is not None:
            return False
        self._keep_up()
        self._session.unprotected(why)
        self._retired = self._performing = True  # each call passes straight through
        return True

    def _begin(self) -> None:
        """At the first call: what came before it was start-up."""
        if self._phase is not Phase.STARTUP:
            return
        self._phase = Phase.BEGINNING
        rng.find(scripts(self._engine.module))
        self.module = ModuleState(self._engine.module, inner_optimizer(self._engine))
        self._gradients, self._weights = Gradients(self._engine), Weights(self._engine)
        self._script = self._adapter.envelope()
        self._began_at = self._passes_from = self.first = self._engine.global_steps
        self._tape = Tape(self._began_at)
        self.kept = Kept.capture()
        self._reached(self._began_at)
        if not self._passes_ahead():
            if not self._session.joining:
                self._adapter.compare()
            self._session.begin(self._adapter, self._position, self._made_up.after(self._redo))

    def top(self) -> dict[str, Any]:
        """Where the script is between two calls."""
        return {
            "position": self._position,
            "counted": dict(self._counted),
            "operations": self._session.comms.operations(),
            "draws": self.draws.place(),
            "state": self._adapter.between(),
        }

    def begin_at_top(self) -> Any:
        """Training begins, on all roles at the same place. Of a newcomer returns the envelope of the version
        that its script is to come to; None where it is there, or is to go through all steps."""
        self._begin()
        return self._catch_up.envelope if self._catch_up is not None and self._session.protecting else None

    def goes_to(self, top: dict[str, Any]) -> None:
        """The script is where another was when `top` was called."""
        self._whole = False
        self._session.overlay.jumps()
        self._reached(top["position"])
        self._passes_from = self._position
        self._counted.update(top["counted"])
        self._session.comms.startup.were_done(top["operations"])
        self.draws.goes_to(top["draws"])
        self._adapter.settle(top["state"])
        self._script = None

    def _passes_ahead(self) -> bool:
        """Others train without this role, and nobody waits for it: have its script pass the steps till now.

        Returns whether there are any that are worth it. Then `begin` is yet to come.
        """
        seen = self._session.progress_of_others()
        gap = seen[0] - self._position if seen is not None else 0
        if seen is None or gap < _NEAR or gap > self._gap / 2:
            return False
        results = Results(seen[1]["results"])
        if not results.covers(self._position):
            return False  # the rest comes with the state
        self._gap = gap
        self._catching_up(*seen)
        self.results = results
        self.draws.follow(seen[1]["draws"])
        return True

    def _call(self, call: Call) -> Any:
        self.draws.calls()
        self._made_up.calls()
        result = self._made(call)
        self.draws.returns()
        self._made_up.returns()
        return result

    def _made(self, call: Call) -> Any:
        call.version = self._position
        if self._phase is Phase.CATCHING_UP:
            return self._answer(call)
        if call.evaluates or call.kind in ("eval_batch", "save", "load"):
            self._session.overlay.complete()
        else:
            self._session.overlay.end(whole=self._whole and self._began_at == self.first)
        self._made_up.given((call.args, call.kwargs, call.losses), "the engine")
        call.context = Context.capture(self._engine)
        if self._gradients.changed():
            call.again = call.again or CHANGED
        if self._weights.changed():
            call.again = call.again or WRITTEN
        self._pending = call
        result = self._persist(call)
        self._pending = None
        if call.kind == "backward":
            self._gradients.left()
        self._weights.left()
        if isinstance(call, Forward) and call.boundary is not None:
            self._forwards.append(call)
        if self._position != self._session.version:
            self._advance()
            self._session.point("between")
        return result

    def _persist(self, call: Call) -> Any:
        ends, action = call.ends_step, call.execute
        while True:
            try:
                self._session.check_epoch()
                before = sum(self._session.comms.counts.values())
                numbers = counters.read(self._engine)
                result = self._perform(call, action)
                communicated = sum(self._session.comms.counts.values()) > before
                if communicated:
                    self._session.exchanged()  # the script's part is not run again
                self._record(call, result, numbers, ends)
                if ends:
                    self.results.record_norm(call.version, self._engine)
                    self.results.step_done()
                    self._check_drawn(call)
                    self.kept = Kept.capture()
                    self._step_done()
                if not call.evaluates or communicated:
                    self._tape.record(call)
                return result
            except CannotRepeat as reason:
                self._session.replace_worker(str(reason))
            except Exception as error:
                if not self._session.interrupted(error):
                    raise
            self._session.recover()
            if self._session.version > call.version:
                # Peers had finished this step, and their copy of its outcome was loaded.
                self._tape.record(call)
                peers = self._adapter.results()
                if self.dealing is not None:
                    self.dealing.restore(self._session.version, self._adapter.loaded["deal"])
                return peers.answer(call.kind, call.version, 0, self._engine.device)
            assert call.context is not None
            call.context.apply(self._engine)
            action = call.repeat

    def _record(self, call: Call, result: Any, numbers: counters.Numbers, ends: bool) -> None:
        """For newcomers. `numbers`: of the engine's, as the call began."""
        number = self._counted[call.kind]
        self._counted[call.kind] += 1
        if call.kind not in ("step", "save"):
            given = call.loss if isinstance(call, (Backward, Direct)) else result
            self.results.record(call.kind, call.version, given)
        if isinstance(call, Backward) and isinstance(result, torch.Tensor) and result.numel() == 1:
            if self._engine.gradient_accumulation_steps() > 1 and not torch.equal(result, call.loss):
                self.results.record_after(call.version, RETURNED, number, {"loss": result.detach()})
        elif isinstance(call, (Step, Batch, Load)):
            expected = self._expected(call, numbers, ends)
            left = counters.other(expected, counters.read(self._engine))
            self.results.record_after(call.version, call.kind, number, left)

    def _perform(self, call: Call, action: Callable[[], Any]) -> Any:
        self._performing = True
        try:
            with self._session.inside(), self._session.overlay.real():  # what the engine saves is no script's
                if (point := _POINTS.get(call.kind, "evaluate" if call.evaluates else None)) is not None:
                    self._session.point(point)
                return action()
        finally:
            self._performing = False

    def _step_done(self) -> None:
        dealt = self.dealing.finish(self._session.version + 1) if self.dealing is not None else None
        if self.loop is not None:
            self.loop.step_done()
        self._adapter.compare()
        self._session.step_done(dealt if self.leads_group else None)

    def _check_drawn(self, call: Call) -> None:
        engine = self._engine
        if self.dealing is None:
            return
        if not isinstance(call, Batch):
            many = self._tape.count(call.version, "backward")
        elif engine.is_first_stage() or engine.is_last_stage():
            many = engine.micro_batches
        else:
            return
        self.dealing.check_drawn(call.version + 1, many)

    def _advance(self) -> None:
        """A step is complete on this role, and so on all roles is the one before it."""
        self._reached(self._session.version)
        self._tape.forget_before(self._position - 1)

    def _reached(self, step: int) -> None:
        self._position = step
        self._counted.clear()
        self._session.comms.reached(step)

    # -- recovery ------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """The adapter is told to drop an abandoned call: the script must find everything as it left it."""
        self._made_up.rests()
        if self._phase is Phase.CATCHING_UP:
            # A recovery that is cut short has loaded another state by now, and the script has not gone on.
            self._script = self._script or self._adapter.envelope()
        elif self._outside is None and self._pending is None:
            self._outside = Context.capture(self._engine)

    def _redo(self) -> None:
        """State `session.version` was loaded: get to where the script is."""
        version = self._session.version
        behind = self._phase is Phase.CATCHING_UP or (version > self._position and self._pending is None)
        if objection := self._objection(version, behind):
            self._session.replace_worker(objection)
        self._session.derive()
        self.references.reset()
        if behind:
            self._follow(version)
            return
        if version <= self._position:
            try:
                for call in self._tape.since(version):
                    self._repeat(call)
            except CannotRepeat as reason:
                self._session.replace_worker(str(reason))
        if self._outside is not None:
            self._outside.apply(self._engine)
            self._outside = None
        self._goes_on()

    def _objection(self, version: int, behind: bool) -> str | None:
        """Why this worker's script cannot get there from where it is."""
        if not behind:
            return self._tape.objection(version, self._pending)
        if version < self._position or (version == self._position and self._counted):
            return f"it has been answered as if beyond step {version}"
        return None

    def _goes_on(self) -> None:
        """The script is where the engine is: give a newcomer's what its predecessor had kept there.

        That is what it was when the step ended. A script that has come here by its own checkpoint is further:
        it has done what comes after that step, and has loaded what it needs.
        """
        if not self.live and (loaded := self._adapter.loaded) is not None:
            if loaded["began"] or self._position > self._began_at:
                self._made_up.seen(self._adapter.kept.apply)
            self._adapter.kept = Kept()
            if objection := self.references.objection(loaded.get("references", [])):
                self._session.cannot_pass(objection)
            self.first = loaded.get("first", self._began_at)
            if self._whole and self.first != self._began_at and (what := self._session.comms.startup.goes_by):
                self._session.cannot_pass(
                    f"it goes by {what}, of peers that began with step {self.first}, where it has "
                    f"begun with its checkpoint of step {self._began_at}"
                )
            self._session.overlay.arrives()
            self._made_up.arrives()
        self._adapter.arrived()
        self._phase = Phase.LIVE

    def _repeat(self, call: Call) -> None:
        assert call.context is not None
        with call.context.entered(self._engine), _quiet(self._engine):
            ends = call.ends_step
            self._perform(call, call.repeat)
        if ends:
            self._step_done()

    # -- newcomers -----------------------------------------------------------------------------

    def _follow(self, version: int) -> None:
        """State `version` is loaded, and the script has yet to get there."""
        self._outside = None  # of a failure while this worker began; where the script is, `_script` says
        self._catching_up(version, self._adapter.loaded)
        self.results = self._adapter.results()
        if version == self._position:
            self._go_live()
            return
        self._adapter.settle(self._script)
        self.draws.follow(self._adapter.loaded["draws"])

    def _keep_up(self) -> None:
        """Take up the next epoch, if this one is over: the script is between two calls."""
        try:
            self._session.check_epoch()
        except EpochChanged:
            self._session.recover()

    def _answer(self, call: Call) -> Any:
        self._script = None  # it has gone on
        if self._session.protecting:
            self._keep_up()
        if self._catch_up is None:  # the recovery went back to where the script is
            return self._made(call)
        self._session.passed()
        until = self._catch_up.until
        number = self._counted[call.kind]
        self._counted[call.kind] += 1
        ends = call.ends_step
        try:
            result = call.answer(self.results, number)
            self._made_up.answered(result)
            self._made_up.known(call.losses)
            self._left(call, number, ends)
        except NotOnRecord as unknown:
            self._session.cannot_pass(str(unknown))
        if ends or isinstance(call, Forward):
            self._adapter.passed()
        if ends:
            self.results.answer_norm(call.version, self._engine)
            if self.dealing is not None:
                self.dealing.finish(self._position + 1)
            self._reached(self._position + 1)
            if (progress := self._catch_up.progress(self._position)) is not None:
                waited_for = logging.WARNING if self._session.protecting else logging.INFO
                log.log(waited_for, "role %d: %s", self._session.role, progress)
            if self._engine.lr_scheduler is not None and getattr(self._engine, "_step_applied", True):
                self._engine.lr_scheduler.step()
            if self._position == until:
                if self._session.protecting:
                    self._go_live()
                elif not self._passes_ahead():
                    self._session.rehearse(self._adapter, self._rehearse)
                    self._session.begin(self._adapter, self._position, self._made_up.after(self._redo))
        elif isinstance(call, Forward):
            self._watch(result)
            if not self._session.protecting:
                self._sample = call
        return result

    def _expected(self, call: Call, numbers: counters.Numbers, ends: bool) -> counters.Numbers:
        return numbers if isinstance(call, Load) else counters.expected(numbers, self._engine, ends)

    def _left(self, call: Call, number: int, ends: bool) -> None:
        """Put what the call has left in the engine's attributes there."""
        if isinstance(call, (Step, Batch, Load)):
            found = self._expected(call, counters.read(self._engine), ends)
            counters.write(self._engine, found | self.results.answer_after(call.version, call.kind, number))

    def _watch(self, result: Any) -> None:
        """Notice where the script calls `backward` for what was answered from the record."""

        def touched(_: Any) -> None:
            self._touched = True

        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(touched)

    def _rehearse(self) -> None:
        """The forward pass that the script has asked for last, and back: see `Session.rehearse`."""
        call, self._sample = self._sample, None
        if call is None or call.kind != "forward":
            return
        context = Context.capture(self._engine)
        self._performing = True
        try:
            call.execute()
            if call.outputs:
                self._engine.backward(call.outputs[0].float().mean())
        finally:
            self._performing = False
            context.apply(self._engine)

    def _go_live(self) -> None:
        assert self._catch_up is not None
        timeline.facts["passed"] = self._position - self._passes_from
        deal = self._catch_up.envelope["deal"]
        if self.dealing is not None and not self.dealing.restore(self._position, deal):
            self._session.replace_worker(
                f"it has drawn other samples for step {self._position + 1} than it should"
            )
        self._adapter.settle(self._catch_up.envelope)
        self._catch_up.close()
        self._catch_up = None
        self.draws.lead()
        self._tape, self._forwards = Tape(self._position), []
        self._goes_on()

    def _catching_up(self, until: int, envelope: Any) -> None:
        """Version `until`, of which this is the envelope, is where the script is to get."""
        self._phase = Phase.CATCHING_UP
        self._session.overlay.passes()
        self._made_up.passes(self._adapter.stepped())
        self._catch_up = self._catch_up or CatchUp(self._position)
        self._catch_up.until, self._catch_up.envelope = until, envelope

    @property
    def position(self) -> int:
        """Steps that the script has done."""
        return self._position

    @property
    def starting(self) -> bool:
        """Whether the script has made no call yet."""
        return self._phase is Phase.STARTUP

    @property
    def live(self) -> bool:
        """Whether the script is where the engine is; else it is a newcomer's, and what it has is made up."""
        return self._phase is Phase.LIVE and not self._retired

    @property
    def began(self) -> bool:
        """Whether the version is what this worker's script began with, and not the outcome of a step."""
        return self._session.version == self._began_at

    def deal(self) -> Any:
        """The deal of the samples, for the envelope."""
        return self.dealing.state(self._session.version) if self.dealing is not None else None

    def point(self, name: str) -> None:
        """A place where a failure may be injected."""
        self._session.point(name)


@contextlib.contextmanager
def _quiet(engine: Any) -> Iterator[None]:
    """DeepSpeed's own log of a step that is done again was written the first time."""
    with replaced(engine.monitor, {"enabled": False}), patched.REPORT.replaced(lambda step: None, of=engine):
        yield

"""A script's calls where its engine is: they are made, on record for newcomers, and made again when a failure
has interrupted one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ft_core.kept import Kept
from ft_core.patching import replaced
from ft_deepspeed import counters, patched, zero
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
    Step,
)
from ft_deepspeed.context import Context
from ft_deepspeed.gradients import BY_PASS, CHANGED, TORN, WRITTEN, Gradients, Weights
from ft_deepspeed.protected_state import ProtectedState
from ft_deepspeed.results import UNRECORDED
from ft_deepspeed.script import Script
from ft_deepspeed.stale import StaleGradients
from ft_deepspeed.tape import Tape

_POINTS = {
    "forward": "forward",
    "train_batch": "forward",
    "evaluation": "evaluate",
    "eval_batch": "evaluate",
    "save": "save",
}
"""Kind of call -> where a failure may be injected when it begins."""


class Live:
    """Makes the calls of one engine."""

    def __init__(self, script: Script, state: ProtectedState) -> None:
        self._script, self._state = script, state
        self._engine, self._session = script.engine, script.session
        self.performing = False
        """Whether a call is being made: then the engine calls itself."""
        self._tape = Tape()
        self._pending: Call | None = None
        """The script's call that is under way, or was interrupted."""
        self._between: Context | None = None
        """Where a failure has interrupted the script between two calls, as it left the engine."""
        self._copied = self._torn = -1
        """The version that was still copied when the script went on after its step; and of those the one in
        which what the script has written since may be."""
        self._recovering = self._written = self._changed = False
        """Whether a recovery has begun; whether the script had written weights before it; or gradients."""
        self._gradients: Gradients
        self._weights: Weights
        self._stale: StaleGradients

    def begin(self) -> None:
        """The script makes its first call."""
        self._gradients = Gradients(self._engine)
        self._weights = Weights(self._engine, zero.inner_optimizers(self._engine))
        self._stale = StaleGradients(self._engine, self._session.role)
        self.go_on()

    def go_on(self) -> None:
        """The script goes on from here, and calls that it has made before are of no use any more."""
        self._tape, self._script.forwards = Tape(self._script.position), []
        self._between = None
        self._copied = self._torn = -1
        self._recovering = self._written = self._changed = False
        self._weights.restored(self._script.position, between=True)

    # -- a call ------------------------------------------------------------------------------------

    def make(self, call: Call) -> Any:
        """Make it, over as many recoveries as it takes. Returns what the script is given."""
        script, session = self._script, self._session
        call.version = script.position
        if call.evaluates or call.kind in ("eval_batch", "save", "load"):
            session.overlay.complete()
        else:
            session.overlay.end(whole=script.whole and script.began_at == script.first)
        script.made_up.given((call.args, call.kwargs, call.losses), "the engine")
        call.context = Context.capture(self._engine)
        if self._gradients.changed():
            call.again = call.again or CHANGED
        if self._weights.changed(saves=isinstance(call, Save)):
            call.again = call.again or WRITTEN
            self._torn = max(self._torn, self._copied)
        if isinstance(call, Forward) and not call.evaluates and self._weights.passes_write:
            call.again = call.again or BY_PASS
        self._pending = call
        result = self._persist(call)
        self._pending, call.given = None, True
        if call.kind in ("backward", "reduction"):
            self._gradients.left()
        changes = script.position != session.version or isinstance(call, Load)
        if self._weights.left(changes, call.evaluates):
            call.again = call.again or BY_PASS
            self._torn = max(self._torn, self._copied)
        if changes:
            self._weights.step_ended(session.version)
        if isinstance(call, Forward) and call.boundary is not None:
            script.forwards = [*script.forwards, call]
        if script.position != session.version:  # a step is complete here
            script.reached(session.version)
            self._tape.forget_before(session.oldest_version)
            self._weights.forget_before(session.oldest_version)
            if self._weights.may_be_written:
                session.end_copying()
            self._copied = session.version if session.copying else -1
            session.point("between")
        return result

    def _persist(self, call: Call) -> Any:
        session, in_place, results = self._session, self._session.in_place, self._script.results
        ends, action = call.ends_step, call.execute
        while True:
            try:
                session.check_epoch()
                before = in_place.issued
                numbers = counters.read(self._engine)
                marks = self._weights.marks() if call.evaluates else []
                result = self.perform(call, action)
                wrote = call.evaluates and marks != self._weights.marks()
                communicated = in_place.issued > before
                if communicated:
                    session.exchanged()  # the script's part is not run again
                self._record(call, result, numbers, ends)
                if ends:
                    results.record_norm(call.version, self._engine)
                    results.step_done()
                    self._check_drawn(call)
                    self._script.kept = Kept.capture()
                    self._step_done()
                differentiable = isinstance(call, Forward) and call.boundary is not None
                if not call.evaluates or communicated or wrote:
                    self._tape.record(call)
                elif differentiable:
                    self._tape.record_while_there(call)
                return result
            except CannotRepeat as reason:
                in_place.replace_worker(str(reason))
            except Exception as error:
                if not in_place.interrupted(error):
                    raise
            in_place.recover()
            if session.version > call.version:
                # Peers had finished this step, and their copy of its outcome was loaded.
                self._tape.record(call)
                peers = self._state.results()
                if self._script.dealing is not None:
                    self._script.dealing.restore(session.version, self._state.loaded["deal"])
                return peers.answer(call.kind, call.version, 0, self._engine.device)
            assert call.context is not None
            call.context.apply(self._engine)
            action = call.repeat

    def _record(self, call: Call, result: Any, numbers: counters.Numbers, ends: bool) -> None:
        """Have it on record for newcomers. `numbers`: the engine's counters as the call began."""
        results, number = self._script.results, self._script.number(call)
        if call.kind not in UNRECORDED:
            given = call.loss if isinstance(call, (Backward, Direct)) else result
            results.record(call.kind, call.version, given)
        if isinstance(call, Backward) and isinstance(result, torch.Tensor) and result.numel() == 1:
            if self._engine.gradient_accumulation_steps() > 1 and not torch.equal(result, call.loss):
                results.record_after(call.version, RETURNED, number, {"loss": result.detach()})
        elif isinstance(call, (Step, Batch, Load)):
            expected = self._script.expected(call, numbers, ends)
            left = counters.other(expected, counters.read(self._engine))
            results.record_after(call.version, call.kind, number, left)

    def perform(self, call: Call, action: Callable[[], Any]) -> Any:
        """Do what a call does, `action`, in which the engine may call itself."""
        self.performing = True
        try:
            # What the engine saves is no script's.
            with self._session.in_place.inside(), self._session.overlay.real():
                if (point := _POINTS.get(call.kind, "evaluate" if call.evaluates else None)) is not None:
                    self._session.point(point)
                return action()
        finally:
            self.performing = False

    def _step_done(self) -> None:
        script = self._script
        dealt = script.dealing.finish(self._session.version + 1) if script.dealing is not None else None
        if script.loop is not None:
            script.loop.step_done()
        self._state.compare()
        self._stale.step_ended(self._session.version + 1)
        self._session.step_done(dealt if script.leads_group else None)

    def _check_drawn(self, call: Call) -> None:
        engine, dealing = self._engine, self._script.dealing
        if dealing is None:
            return
        if not isinstance(call, Batch):
            many = self._tape.count(call.version, "backward")
        elif engine.is_first_stage() or engine.is_last_stage():
            many = engine.micro_batches
        else:
            return
        dealing.check_drawn(call.version + 1, many)

    # -- recovery ----------------------------------------------------------------------------------

    @property
    def is_between(self) -> bool:
        """Whether the script is between two calls."""
        return self._pending is None

    def interrupted(self) -> None:
        """An epoch is over: the script must find everything as it left it."""
        session, position = self._session, self._script.position
        there = session.between_steps and session.version == position and not isinstance(self._pending, Load)
        if not self._recovering:
            self._changed = self._pending is None and self._gradients.differ()
            if there:
                self._written = self._weights.differ(position)
        self._recovering = True
        if self._between is None and self._pending is None:
            self._between = Context.capture(self._engine)

    def objection(self, version: int) -> str:
        """Why this worker's script cannot get from `version` to where it is, if so."""
        if version == self._torn:
            self._session.in_place.cannot_pass(TORN)
        if self._written or self._weights.were_written(version):
            return WRITTEN
        if self._changed:
            return CHANGED
        return self._tape.objection(version, self._pending)

    def redo(self, version: int) -> None:
        """State `version` was loaded: make the calls since then again, but for the one under way."""
        if version <= self._script.position:
            try:
                for call in self._tape.since(version):
                    self._repeat(call)
            except CannotRepeat as reason:
                self._session.in_place.replace_worker(str(reason))
        if self._between is not None:
            self._between.apply(self._engine)
            self._between = None
        self._weights.restored(self._session.version, between=self.is_between)
        self._recovering = False

    def _repeat(self, call: Call) -> None:
        assert call.context is not None
        with call.context.entered(self._engine), _quiet(self._engine):
            ends = call.ends_step
            self.perform(call, call.repeat)
        if ends:
            self._step_done()


@contextlib.contextmanager
def _quiet(engine: Any) -> Iterator[None]:
    """DeepSpeed's own log of a step that is done again was written the first time."""
    with replaced(engine.monitor, {"enabled": False}), patched.REPORT.replaced(lambda step: None, of=engine):
        yield

"""A newcomer's script on its way to where its engine is: its calls are counted and answered."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ft_core import kept
from ft_core.errors import CorruptSnapshot, EpochChanged
from ft_core.process.timeline import timeline
from ft_deepspeed import counters, zero
from ft_deepspeed.calls import Batch, Call, Forward, Load, Step
from ft_deepspeed.catch_up import CatchUp
from ft_deepspeed.context import Context
from ft_deepspeed.history import NAME as HISTORY
from ft_deepspeed.live import Live
from ft_deepspeed.protected_state import ProtectedState
from ft_deepspeed.results import NotOnRecord, Results
from ft_deepspeed.script import Phase, Script
from ft_deepspeed.unknown import DECIDES, Unknown

log = logging.getLogger(__name__)

TRAINS = (
    "its script trains a tensor of shape {} itself, beside the engine, and its gradients are not computed "
    "again (name it, and its optimizer: keep(...=...))"
)
_NEAR = 8
"""Steps that a newcomer's script passes with others waiting, rather than ask once more how far they are."""


class Newcomer:
    """Brings the script of one worker to where its peers are, where it has to begin behind them."""

    def __init__(
        self,
        script: Script,
        state: ProtectedState,
        live: Live,
        enters: Callable[[], None],
        arrives: Callable[[], None],
    ) -> None:
        """`enters`: takes part in the epochs from here on. `arrives`: the script is where the engine is."""
        self._script, self._state, self._live = script, state, live
        self._engine, self._session = script.engine, script.session
        self._enters, self._arrives = enters, arrives
        self._way: CatchUp | None = None
        """While the script catches up."""
        self._from = 0
        """Where it was when it began to pass steps."""
        self._place: Any = None
        """Counters, random states and schedules where the script is: the engine is further on."""
        self._sample: Forward | None = None
        self._trained: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}
        """What its passed steps would have given gradients to beside the engine's weights, and when first;
        None of what is known to do no harm."""
        self._gap = math.inf
        """Steps that it was behind when it began to pass them, see `passes_ahead`."""

    def begin(self) -> None:
        """The script makes its first call."""
        self._place, self._from = self._state.envelope(), self._script.position

    @property
    def target(self) -> Any:
        """The envelope of the version that the script is to come to, once others know of this worker."""
        return self._way.envelope if self._way is not None and self._session.protecting else None

    def goes_to(self, top: dict[str, Any]) -> None:
        """The script is where another was, which has told of it by `top` (`Protection.top`)."""
        self._session.overlay.jumps()
        self._script.goes_to(top["position"], top["counted"])
        self._from = self._script.position
        self._session.in_place.were_done(top["operations"])
        self._script.draws.goes_to(top["draws"])
        self._state.settle(top["state"])
        self._place = None

    def passes_ahead(self) -> bool:
        """Others train without this role, and nobody waits for it: have its script pass the steps till now.

        Returns whether there are any that are worth it. Then it is yet to take part.
        """
        position = self._script.position
        seen = self._session.in_place.progress_of_others()
        gap = seen.version - position if seen is not None else 0
        if seen is None or gap < _NEAR or gap > self._gap / 2:
            return False
        try:
            results = Results.newest(seen.envelope["results"])
            if not results.covers(position):
                seen = self._session.in_place.progress_of_others(HISTORY)
                if seen is None or not seen.tensor:
                    return False  # the rest comes with the state
                older = torch.frombuffer(bytearray(seen.tensor), dtype=torch.uint8)
                results = Results(seen.envelope["results"], older)
                if not results.covers(position):
                    return False
        except CorruptSnapshot as error:
            role = self._session.role
            log.warning("role %d: %s; its script gets to the others with the epoch to come", role, error)
            return False
        self._gap = gap
        self._catches_up(seen.version, seen.envelope, results)
        return True

    def _catches_up(self, until: int, envelope: Any, results: Results) -> None:
        """Version `until`, of which this is the envelope, is where the script is to get."""
        script = self._script
        as_first = script.began_at == envelope.get("first", script.began_at)
        as_first &= self._session.goes_on_from_memory  # between two jobs files may change
        began = envelope.get("since", math.inf), envelope.get("machine") == script.machine
        if as_first and (read := self._session.overlay.read_since(*began)):
            self._session.in_place.cannot_pass(
                f"it goes by {read}, which it has read at its start, and which was written in training "
                "(what `engine.load_checkpoint` loads is known)"
            )
        script.phase = Phase.CATCHING_UP
        self._session.overlay.passes()
        script.made_up.passes(self._state.stepped(), zero.inner_optimizers(self._engine))
        self._way = self._way or CatchUp(script.position)
        self._way.until, self._way.envelope = until, envelope
        script.results = results
        if until != script.position:
            script.draws.follow(envelope["draws"])
            script.loads.follow(envelope.get("loads"), until)

    # -- recovery ----------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """An epoch is over. A recovery that is cut short has loaded another state by then, and the script has
        not gone on."""
        self._place = self._place or self._state.envelope()

    def objection(self, version: int) -> str:
        """Why this worker's script cannot get to `version` from where it is, if so."""
        position = self._script.position
        if version < position or (version == position and self._script.counted()):
            return f"it has been answered as if beyond step {version}"
        return ""

    def follow(self, version: int) -> None:
        """State `version` is loaded, and the script has yet to get there."""
        self._live.go_on()  # nothing that came before a failure while this worker began
        self._catches_up(version, self._state.loaded, self._state.results())
        if version == self._script.position:
            self._go_live()
        else:
            self._state.settle(self._place)

    def keep_up(self) -> None:
        """Take up the next epoch, if this one is over: the script is between two calls."""
        try:
            self._session.check_epoch()
        except EpochChanged:
            self._session.in_place.recover()

    # -- calls -------------------------------------------------------------------------------------

    def answer(self, call: Call) -> Any:
        """Answer it as the predecessor's was, or make it where the script is where the engine is by now."""
        script, session = self._script, self._session
        self._place = None  # it has gone on
        if session.protecting:
            self.keep_up()
        if self._way is None:  # the recovery went back to where the script is
            return self._live.make(call)
        call.version = script.position
        session.in_place.passed()
        until, number, ends = self._way.until, script.number(call), call.ends_step
        try:
            self._check_trained(call)
            result = call.answer(script.results, number)
            script.made_up.answered(result)
            script.made_up.known(call.losses)
            self._left(call, number, ends)
        except NotOnRecord as unknown:
            session.in_place.cannot_pass(str(unknown))
        if ends or isinstance(call, Forward):
            self._state.passed()
        if ends:
            self._passed_step(call, self._way)
            if script.position == until:
                script.made_up.puts_back()  # before anything is done with it
                if session.protecting:
                    self._go_live()
                elif not self.passes_ahead():
                    timeline.facts["passed_ahead"] = script.position - self._from
                    session.rehearse(self._state, self._rehearse)
                    self._enters()
        elif isinstance(call, Forward):
            self._watch(result)
            if not session.protecting:
                self._sample = call
        return result

    def _passed_step(self, call: Call, way: CatchUp) -> None:
        script, engine = self._script, self._engine
        self._check_counted(call.version)
        script.results.answer_norm(call.version, engine)
        if script.dealing is not None:
            script.dealing.finish(script.position + 1)
        script.reached(script.position + 1)
        if (progress := way.progress(script.position)) is not None:
            waited_for = logging.WARNING if self._session.protecting else logging.INFO
            log.log(waited_for, "role %d: %s", self._session.role, progress)
        if engine.lr_scheduler is not None and getattr(engine, "_step_applied", True):
            self._step_schedule(call.given_schedule if isinstance(call, Step) else {})

    def _step_schedule(self, given: dict[str, Any]) -> None:
        """As DeepSpeed does it."""
        if any(isinstance(value, Unknown) for value in pytree.tree_leaves(given)):
            self._session.in_place.cannot_pass(DECIDES)
        try:
            self._engine.lr_scheduler.step(**given)
        except TypeError:
            self._engine.lr_scheduler.step(self._engine.train_batch_size())

    def _check_trained(self, call: Call) -> None:
        """Refuse what the script itself trains by the loss, as its gradients are not computed here: what some
        optimizer steps, be it a parameter or whatever is there for longer than a step."""
        stepped: set[int] | None = None
        for tensor in call.trained:
            there, since = self._trained.get(id(tensor), (None, call.version))
            if there is None or there() is not tensor:
                there, since = weakref.ref(tensor), call.version
            elif since is None:
                continue
            if isinstance(tensor, torch.nn.Parameter) or since < call.version:
                stepped = _stepped() if stepped is None else stepped
                if id(tensor) in stepped and not kept.covers(tensor):
                    self._session.in_place.cannot_pass(TRAINS.format(tuple(tensor.shape)))
                since = None
            self._trained[id(tensor)] = there, since
        if call.ends_step:
            self._trained = {at: found for at, found in self._trained.items() if found[0]() is not None}

    def _check_counted(self, version: int) -> None:
        """Refuse to go on where the script has made fewer calls in a step than its predecessor: it has come
        to another decision. In the step in which it began it may have begun later."""
        if version <= self._from:
            return
        made = self._script.counted()
        for kind, many in self._script.results.counted(version).items():
            if (own := made.get(kind, 0)) < many:
                what = f"in step {version + 1} it makes {own} calls of {kind}, and there were {many}"
                self._session.in_place.cannot_pass(what)

    def _left(self, call: Call, number: int, ends: bool) -> None:
        """Put what the call has left in the engine's attributes there."""
        if isinstance(call, (Step, Batch, Load)):
            found = self._script.expected(call, counters.read(self._engine), ends)
            left = self._script.results.answer_after(call.version, call.kind, number)
            counters.write(self._engine, found | left)

    def _watch(self, result: Any) -> None:
        """Notice where the script calls `backward` for what was answered from the record."""

        def touched(_: Any) -> None:
            self._script.touched = True

        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(touched)

    def _rehearse(self) -> None:
        """The forward pass that the script has asked for last, and back: see `Session.rehearse`."""
        call, self._sample = self._sample, None
        if call is None or call.kind != "forward":
            return
        context = Context.capture(self._engine)
        self._live.performing = True
        try:
            given = call.execute()  # the graph is there as long as this is
            if call.outputs:
                self._engine.backward(call.outputs[0].float().mean())
            del given
        finally:
            self._live.performing = False
            context.apply(self._engine)

    def _go_live(self) -> None:
        assert self._way is not None
        script, envelope = self._script, self._way.envelope
        if problem := script.loads.lead():
            self._session.in_place.cannot_pass(problem)
        timeline.facts["passed"] = script.position - self._from
        timeline.facts["left_out"] = script.loads.left_out
        if script.dealing is not None and not script.dealing.restore(script.position, envelope["deal"]):
            self._session.in_place.replace_worker(
                f"it has drawn other samples for step {script.position + 1} than it should"
            )
        self._state.settle(envelope)
        self._way.close()
        self._way = None
        script.draws.lead()
        self._live.go_on()
        self._arrives()


def _stepped() -> set[int]:
    """All that some optimizer of the script's has to step, by identity."""
    optimizers = (found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer))
    groups = (group for optimizer in optimizers for group in vars(optimizer).get("param_groups", ()))
    return {id(tensor) for group in groups for tensor in group["params"]}

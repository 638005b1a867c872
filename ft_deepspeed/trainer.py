"""Hugging Face's Trainer: a newcomer's loop begins where its peers are, as Trainer resumes from a checkpoint.

At the top of each update what the loop has in it is noted as plain data, and goes with the version that the
update makes. A newcomer's start-up runs as everybody's; at its first epoch it is given the state, and its
loop begins at the top of the update that made it: that one update is passed over, whatever the step is. No
checkpoint is written or read. Where something cannot be carried, all steps are passed over, as those of any
other script are.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ft_core.adapter import StateTensor
from ft_core.errors import CorruptSnapshot
from ft_core.patching import replaced
from ft_core.state import rng
from ft_core.worker.session import Session
from ft_deepspeed import patched, schedule
from ft_deepspeed.data_place import DataPlace, has_attributes
from ft_deepspeed.growing import Growing
from ft_deepspeed.script_state import Opaque, ScriptState, variables

log = logging.getLogger(__name__)

HISTORY = "script/log history"
"""The name of the tensor in a snapshot that has what Trainer has logged."""
_SEEN = 2
"""Steps after which roles agree on whether their loops can be carried."""
_IN_MEMORY = "(in memory)"
"""Stands for the directory of a checkpoint."""


class Loop(Protocol):
    """What a framework's loop has to know of the script's calls; see `Protection`."""

    @property
    def live(self) -> bool:
        """Whether the script is where the engine is."""

    @property
    def position(self) -> int:
        """Steps that the script has done."""

    @property
    def starting(self) -> bool:
        """Whether the script has made no call yet."""

    def top(self) -> dict[str, Any]:
        """Where the script is between two calls."""

    def begin_at_top(self) -> Any:
        """Training begins, on all roles at the same place. Of a newcomer returns the envelope of the version
        that its script is to come to; None where it is there."""

    def goes_to(self, top: dict[str, Any]) -> None:
        """The script is where another was when `top` was called."""


class TrainerLoop:
    """The loop of the Trainer that trains with the engine that is protected."""

    def __init__(self, calls: Loop, session: Session, module: torch.nn.Module) -> None:
        """Has the hooks in place that do it."""
        self._calls, self._session, self._module = calls, session, module
        self._data = DataPlace()
        self._script: ScriptState | None = None
        self._tops: dict[int, dict[str, Any]] = {}
        """By position, of the newest two updates."""
        self._history = Growing(HISTORY)
        self._logged: list[dict[str, Any]] = []
        """What is in it, where it was loaded."""
        self._known: tuple[int, Any] = 0, None
        """How many entries are in it, and the newest."""
        self._to_log: list[bytes] = []
        """What is still to go there."""
        self._target: dict[str, Any] | None = None
        """The update at which this newcomer's loop begins."""
        self._first = -1
        """At which position the loop was entered; -1: not yet."""
        self._agreed: bool | None = None
        """Whether no role has anything that cannot be carried: else all go through all steps, since one that
        does needs what the others have on record of them. None: they have yet to agree."""
        self._objection: str | None = None
        patched.UPDATES.wrap(self._updates)
        patched.LOAD_RANDOM.wrap(self._load_random)
        patched.EVALUATE.wrap(self._evaluate)
        patched.SKIP.wrap(self._skip)

    # -- what goes with a version ------------------------------------------------------------------

    def envelope(self, version: int) -> Any:
        """The top of the update that made it, where that is known, and what all roles agree on."""
        return {"first": self._first, "agreed": self._agreed, "top": self._tops.get(version - 1)}

    def tensors(self, holders: tuple[int, ...]) -> Iterator[StateTensor]:
        """What Trainer has logged."""
        return self._history.tensors(holders)

    def step_done(self) -> None:
        """Once the state is the next version, and nobody copies the one before any more."""
        for line in self._to_log:
            self._history.append(line)
        self._to_log = []

    # -- hooks -------------------------------------------------------------------------------------

    def _updates(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def run_epoch(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            trainer = given["self"]
            if getattr(trainer, "deepspeed", None) is None or self._is_another(trainer):
                return original(*args, **kwargs)
            self._ask(trainer)
            batches = 0
            if given["epoch"] == given["epochs_trained"] and given["resume_from_checkpoint"] is not None:
                batches = given["steps_trained_in_current_epoch"]
            target = self._target
            if target is not None:
                if given["epoch"] < target["epoch"]:
                    return None  # the loop goes on to the next
                batches = target["batches"]
                given["epochs_trained"], given["resume_from_checkpoint"] = given["epoch"], _IN_MEMORY
                given["steps_trained_in_current_epoch"] = batches
                self._restore(trainer, target)
            epoch = _Epoch(self, trainer, given["epoch"], batches)
            self._data.begin(given["train_dataloader"], self._module)
            always = {"ignore_data_skip": False} if target is not None else {}
            try:
                with replaced(trainer, {"get_batch_samples": epoch.draw}), replaced(trainer.args, always):
                    return original(*bound.args, **bound.kwargs)
            finally:
                self._data.ends()

        return run_epoch

    def _is_another(self, trainer: Any) -> bool:
        return getattr(trainer.deepspeed, "ft_protection", None) is not self._calls

    def _load_random(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_rng_state(trainer: Any, checkpoint: Any) -> None:
            if checkpoint != _IN_MEMORY:
                original(trainer, checkpoint)

        return load_rng_state

    def _evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(trainer, "deepspeed", None) is not None and not self._is_another(trainer):
                self._ask(trainer)
                if self._target is not None:
                    return None  # before the first step
            return original(trainer, *args, **kwargs)

        return evaluate

    def _skip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
            return original(loader, num_batches) if self._target is None else loader

        return skip_first_batches

    # -- a newcomer --------------------------------------------------------------------------------

    def _ask(self, trainer: Any) -> None:
        """Once, before the first update: what is the script's, and where are its peers?"""
        if self._first >= 0:
            return
        apart = [trainer, trainer.train_dataset, trainer.data_collator]
        self._script = ScriptState(_spaces(trainer), self._module, apart)
        envelope = self._calls.begin_at_top() if self._calls.starting else None
        self._first = self._calls.position
        found = envelope.get("loop") if envelope is not None else None
        if found is None:
            return
        self._first, self._agreed = found["first"], found["agreed"]
        if (top := found["top"]) is None:
            return
        if top["callbacks"] != _names(trainer):
            self._session.in_place.cannot_pass("the callbacks of its Trainer are other ones than before")
        self._target = top
        self._calls.goes_to(top["calls"])
        log.info("role %d: its loop begins at update %d", self._session.role, top["state"]["global_step"] + 1)

    def loaded(self, found: Any, history: torch.Tensor | None) -> None:
        """A newcomer's state comes with this `envelope` and what was logged. Raises CorruptSnapshot."""
        top = found["top"] if found is not None else None
        if top is None:
            return
        self._history = Growing(HISTORY, top["history"], history)
        try:
            lines = bytes(self._history.view()).split(b"\n")[:-1]
            self._logged, self._to_log = [json.loads(line) for line in lines], []
            self._known = len(lines), self._logged[-1] if lines else None
        except ValueError as error:
            raise CorruptSnapshot(f"what Trainer has logged is not readable ({error})") from error

    def _restore(self, trainer: Any, top: Mapping[str, Any]) -> None:
        vars(trainer.state).update(top["state"])
        trainer.state.log_history[:] = list(self._logged)
        vars(trainer.control).update(top["control"])
        if top["schedule"] is not None:
            schedule.restore(trainer.lr_scheduler, top["schedule"])
        assert self._script is not None
        self._script.restore(top["script"])
        self._tops = {top["calls"]["position"]: dict(top)}

    def _arrive(self, trainer: Any) -> None:
        """All is as it was at the top of the update."""
        assert self._target is not None
        self._restore(trainer, self._target)
        rng.restore(self._target["calls"]["state"]["engine"]["rng"])

    # -- each update -------------------------------------------------------------------------------

    def _agree(self, device: Any) -> None:
        """A collective, once, when each role has seen what a step changes."""
        if self._agreed is None and self._calls.position == self._first + _SEEN:
            can = torch.tensor([self._objection is None], dtype=torch.int32, device=device)
            dist.all_reduce(can, op=dist.ReduceOp.MIN)
            self._agreed = bool(can.item())

    def _note(self, epoch: _Epoch, iterator: Any) -> None:
        if not self._calls.live or self._agreed is False:
            return
        try:
            top = self._captured(epoch, iterator)
        except Opaque as what:
            self._tops.clear()
            if self._objection != str(what):
                self._objection = str(what)
                log.warning("a worker that takes over goes through all steps: %s cannot be carried", what)
            return
        if self._agreed is None:
            return
        position = top["calls"]["position"]
        self._tops = {at: kept for at, kept in self._tops.items() if at == position - 1} | {position: top}

    def _captured(self, epoch: _Epoch, iterator: Any) -> dict[str, Any]:
        trainer = epoch.trainer
        assert self._script is not None
        state = {f.name: getattr(trainer.state, f.name) for f in fields(trainer.state)}
        self._note_logs(state.pop("log_history"))
        its_own = trainer.lr_scheduler is not getattr(trainer.deepspeed, "lr_scheduler", None)
        return {
            "epoch": epoch.number,
            "batches": epoch.batches,
            "state": json.loads(json.dumps(state, default=float)),
            "history": self._history.used + sum(map(len, self._to_log)),
            "control": dict(vars(trainer.control)),
            "callbacks": _names(trainer),
            "schedule": schedule.capture(trainer.lr_scheduler) if its_own else None,
            "script": self._script.capture(),
            "data": self._data.capture(iterator),
            "calls": self._calls.top(),
        }

    def _note_logs(self, entries: list[dict[str, Any]]) -> None:
        known, newest = self._known
        if len(entries) < known or (known and entries[known - 1] != newest):
            raise Opaque("a log history that is cut")
        for entry in entries[known:]:
            try:
                line = json.dumps(entry)
            except (TypeError, ValueError):
                raise Opaque("what it logs") from None
            self._to_log.append(f"{line}\n".encode())
        if entries:
            self._known = len(entries), dict(entries[-1])


class _Epoch:
    """One epoch of a Trainer's, while it runs."""

    def __init__(self, loop: TrainerLoop, trainer: Any, number: int, batches: int) -> None:
        self.trainer, self.number = trainer, number
        self.batches = batches
        """That are used up."""
        self._loop, self._begins = loop, True
        self._original = trainer.get_batch_samples

    def draw(self, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of `Trainer.get_batch_samples`: the top of an update."""
        loop, first = self._loop, self._begins
        self._begins = False
        if (target := loop._target) is not None:
            found = self._led(target, iterator, *args, **kwargs)
        else:
            loop._agree(self.trainer.args.device)
            loop._note(self, iterator)
            with loop._data.drawing(first):
                found = self._original(iterator, *args, **kwargs)
        self.batches += len(found[0])
        return found

    def _led(self, target: dict[str, Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
        loop = self._loop
        if not target["data"]:  # the iteration begins here
            loop._arrive(self.trainer)
            loop._target = None
            with loop._data.drawing(True):
                return self._original(iterator, *args, **kwargs)
        with loop._data.leading(target["data"], self.batches, lambda: loop._arrive(self.trainer)):
            found = self._original(iterator, *args, **kwargs)
        loop._target = None
        if not loop._data.arrived:
            loop._session.in_place.cannot_pass("its data are other ones than before")
        return found


def _names(trainer: Any) -> list[str]:
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


def _spaces(trainer: Any) -> Iterator[Any]:
    callbacks = [
        (f"callback {at} {type(callback).__name__}", callback)
        for at, callback in enumerate(trainer.callback_handler.callbacks)
    ]
    functions = [(name, value) for name, value in vars(trainer).items() if callable(value)]
    yield "trainer", vars(trainer), True
    for name, callback in callbacks:
        if has_attributes(callback):
            yield name, vars(callback), True
    yield from variables([("trainer", trainer), *callbacks, *functions])

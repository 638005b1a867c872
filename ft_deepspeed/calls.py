"""The calls a script makes to a DeepSpeed engine, as objects that can be made again.

A script protected in place does not unwind when a failure interrupts it. What it had done since the
version that everybody goes on from is done again on its behalf: the same calls, with the same inputs and
random states, which on restored state gives the same bits. What the script computed between the calls
(its loss function) is not run again: of it, the gradient at the engine's outputs is enough.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import os
import weakref
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ft_core.patching import replaced
from ft_core.state import rng
from ft_deepspeed.context import Context
from ft_deepspeed.results import Results

RETURNED = "backward"
"""Under this name is on record what a backward pass has returned that is not the script's loss."""
_GONE = "what its loss was computed from is not there any more"
BESIDE = "its loss has terms that do not come from the engine's outputs, so what computed them must run again"
_LOOP = frozenset({"state", "control"})
"""What Hugging Face's Trainer saves of its own loop."""
_LOOKED_AT = 10_000
"""Nodes of a graph that leads into the engine's part, at most, once that is known."""


class CannotRepeat(Exception):  # noqa: N818 - said of a call
    """A call cannot be made again. Says why."""


class Call:
    """One call of the engine's `method`. Executed at once, and again when a recovery needs it."""

    kind = "call"
    """Its results are kept under this name; see `Results`."""
    evaluates = False
    """Whether it should change nothing: it need not be made again unless it has, or has communicated."""

    def __init__(self, engine: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.engine, self.method, self.args, self.kwargs = engine, method, args, kwargs
        self.version = -1
        self.given = False
        """Whether the script has what it returns."""
        self.context: Context | None = None
        self.again: str = ""
        """Why this call cannot be made again, if so."""

    def execute(self) -> Any:
        """Make the call, for the script or again. Returns what the method does."""
        return self.method(*self.args, **self.kwargs)

    def repeat(self) -> Any:
        """Once more, for the engine's state. Returns what the script is given if it still waits for it."""
        return self.execute()

    def answer(self, results: Results, number: int) -> Any:
        """Stand for a call of a step that is done, on a newcomer: nothing is computed."""
        return results.answer(self.kind, self.version, number, torch.device(self.engine.device))

    @property
    def losses(self) -> list[torch.Tensor]:
        """The script's losses that a backward pass begins with, until it is done."""
        return []

    @property
    def trained(self) -> list[torch.Tensor]:
        """What a backward pass gives gradients to beside the engine's weights, until it is done."""
        return []

    @property
    def ends_step(self) -> bool:
        """Before it is made: whether the state will be the next version after it."""
        return False

    def release(self) -> None:
        """It is done for good, or will be made again from its inputs: drop what it computed."""


class Forward(Call):
    """`engine(...)`. The script gets the outputs, on the graph that they come with; see `_Boundary`.

    That graph refers to the call, and the call to nothing of it: it goes when the script drops the outputs,
    as it would without us.
    """

    def __init__(self, engine: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(engine, method, args, kwargs)
        self.evaluates = not engine.module.training
        self.kind = "evaluation" if self.evaluates else "forward"
        self._saved: Any = None
        self._newest: list[torch.Tensor] = []
        """Outputs of the newest execution, where the script has those of the first."""
        self._node: weakref.ref[Any] | None = None
        self.differentiated = False
        """Whether a backward pass goes through it, or has."""
        self.gradients: tuple[torch.Tensor | None, ...] | None = None
        """At the outputs that need one, once the script's part of the backward pass has run."""

    def execute(self) -> Any:
        """Forward with the script's own inputs."""
        if any(t.requires_grad for t in tensors_of((self.args, self.kwargs))):
            self.again = "the engine's inputs require gradients, so what computed them must run again"
        self._saved = copied((self.args, self.kwargs))
        result = self.method(*self.args, **self.kwargs)
        self.args, self.kwargs = (), {}
        return self._handed_out(result)

    def repeat(self) -> Any:
        """Forward with copies of the inputs, which the model may overwrite."""
        if self._saved is None:  # interrupted before it had begun
            return self.execute()
        args, kwargs = copied(self._saved)
        result = self.method(*args, **kwargs)
        if self._node is None or not self.given:  # an error may come late, after the pass has returned
            return self._handed_out(result)
        if self.differentiated or self.boundary is not None:
            self._newest = _differentiable(result)
        return result  # the script has its outputs already

    def _handed_out(self, result: Any) -> Any:
        outputs = _differentiable(result)
        if not outputs:
            return result
        made = iter(_Boundary.apply(self, *outputs))
        given = pytree.tree_map(lambda v: next(made) if _needs_gradient(v) else v, result)
        self._node = weakref.ref(_differentiable(given)[0].grad_fn)
        return given

    @property
    def boundary(self) -> Any:
        """The node of the graph between the engine's part and the script's; None: no gradient is needed, or
        nobody can ask for it any more."""
        return self._node() if self._node is not None else None

    @property
    def edges(self) -> list[Any]:
        """Where the script's part ends, for each output that needs a gradient."""
        node = self.boundary
        return [] if node is None else [GradientEdge(node, at) for at in range(node.many)]

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Those outputs of the newest execution that need gradients."""
        return self._newest or getattr(self.boundary, "outputs", [])

    def release(self) -> None:
        """After its backward pass."""
        self._newest = []
        if (node := self.boundary) is not None:
            node.outputs = []


class Backward(Call):
    """`engine.backward(loss)`, for the forward passes that came before it.

    Made again, DeepSpeed is given a loss of the same value whose graph begins at the engine's newest outputs,
    and the gradients there that were found the first time.
    """

    kind = "backward"

    def __init__(
        self, engine: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], forwards: list[Forward]
    ) -> None:
        super().__init__(engine, method, args, kwargs)
        self._retained = bool(kwargs.get("retain_graph"))
        self._loss: torch.Tensor | None = kwargs.pop("loss") if "loss" in kwargs else args[0]
        self.args = args[1:]
        if not isinstance(self._loss, torch.Tensor):
            raise TypeError(f"engine.backward: the loss must be a tensor, not {type(self._loss).__name__}")
        self._value = self._loss.detach().clone()
        self._script = ScriptPart([self._loss], forwards, engine)
        self.again = self._script.objection

    def execute(self) -> Any:
        """Backward through the script's part of the graph and the engine's."""
        self.engine.ft_protection.point("backward")
        result = self.method(self._loss, *self.args, **self.kwargs)
        return self._returned(result)

    def repeat(self) -> Any:
        """Backward through the engine's part. Raises CannotRepeat."""
        outputs = self._script.outputs()
        if not outputs:
            if self._loss is None:
                raise CannotRepeat(_GONE)
            return self.execute()
        return self._returned(self.method(_Bridge.apply(self, *outputs), *self.args, **self.kwargs))

    def _returned(self, result: Any) -> Any:
        if not self._retained:
            self._script.release()
            self._loss = None
        return result.detach() if isinstance(result, torch.Tensor) else result

    @property
    def losses(self) -> list[torch.Tensor]:
        """The script's."""
        return [] if self._loss is None else [self._loss]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The script's."""
        return self._script.leaves

    @property
    def loss(self) -> torch.Tensor:
        """The value that the script's loss had."""
        return self._value

    def answer(self, results: Results, number: int) -> Any:
        """No gradient is needed. The script's loss, made of outputs without content, gets its true value."""
        value = super().answer(results, number)
        if value is not None and self._loss is not None:
            self._loss.detach().copy_(value)
            if not self._retained:
                _cut_off(self._loss)
        returned = results.answer_after(self.version, RETURNED, number)
        if not returned or self._loss is None:
            return self._loss
        return torch.full_like(self._loss.detach(), returned["loss"])

    def gradients(self, scale: torch.Tensor) -> list[torch.Tensor | None]:
        """At all outputs, for the gradient that DeepSpeed feeds into the loss. Raises CannotRepeat."""
        return self._script.gradients([scale])


class Direct(Call):
    """`loss.backward()`, where DeepSpeed allows it, of losses that the engine's outputs are in."""

    kind = "backward"

    def __init__(
        self, engine: Any, backward: Any, losses: Any, script: ScriptPart, args: Any, kwargs: Any
    ) -> None:
        """`backward`: torch's own, given `losses`, `args` and `kwargs`; `script`: its part in it."""
        super().__init__(engine, backward, (losses, *args), kwargs)
        self._losses, self._scales = tensors_of(losses), tensors_of(args[0]) or None
        self._script, self.again = script, script.objection
        self.retained = bool(kwargs.get("retain_graph") or kwargs.get("create_graph"))
        self.loss = [loss.detach().clone() for loss in self._losses]
        """The values that the script's losses had."""

    def execute(self) -> None:
        """Backward through the script's part of the graph and the engine's."""
        self.engine.ft_protection.point("backward")
        self.method(*self.args, **self.kwargs)
        self._release()

    def repeat(self) -> None:
        """Backward through the engine's part. Raises CannotRepeat."""
        outputs, gradients = self._script.outputs(), self._script.gradients(self._scales)
        reached = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None]
        self.method([t for t, _ in reached], [g for _, g in reached], retain_graph=self.retained)
        self._release()

    @property
    def losses(self) -> list[torch.Tensor]:
        """The script's."""
        return self._losses

    @property
    def trained(self) -> list[torch.Tensor]:
        """The script's."""
        return self._script.leaves

    def _release(self) -> None:
        if not self.retained:
            self.args, self._losses = (), []
            self._script.release()

    def answer(self, results: Results, number: int) -> None:
        """The script's losses, made of outputs without content, get their true values."""
        for loss, value in zip(self._losses, super().answer(results, number) or (), strict=False):
            loss.detach().copy_(value)


def _cut_off(loss: torch.Tensor) -> None:
    """Leave it nothing of what it was computed from, as after its backward pass."""
    if loss._base is None:
        loss.detach_()


class _Boundary(torch.autograd.Function):
    """Between the engine's part of the graph and the script's: notes the gradients that come through.

    All of one forward pass come at once, when the script's part is done.
    """

    @staticmethod
    def forward(ctx: Any, call: Forward, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.outputs, ctx.many = call, list(outputs), len(outputs)
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call: Forward = ctx.call
        before = call.gradients
        call.gradients = gradients if before is None else tuple(map(_added, before, gradients))
        return None, *gradients


class _Bridge(torch.autograd.Function):
    """Joins a loss to the engine's outputs, in place of the graph in between."""

    @staticmethod
    def forward(ctx: Any, call: Backward, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return call.loss.clone()

    @staticmethod
    def backward(ctx: Any, *scale: Any) -> Any:
        call: Backward = ctx.call
        call.engine.ft_protection.point("backward")
        return None, *call.gradients(scale[0])


class Step(Call):
    """A call of `engine.step()`."""

    kind = "step"

    @property
    def given_schedule(self) -> dict[str, Any]:
        """What the schedule's own step is given."""
        return self.kwargs.get("lr_kwargs", next(iter(self.args), None)) or {}

    @property
    def ends_step(self) -> bool:
        """At the end of gradient accumulation."""
        engine = self.engine
        managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
        return not managed or engine.is_gradient_accumulation_boundary()

    def answer(self, results: Results, number: int) -> Any:
        """Nothing is done: what the call left in the engine's attributes is put there by `Protection`."""
        return None


class Batch(Call):
    """`train_batch` or `eval_batch` of a pipeline engine. What it draws from the iterator is kept."""

    def __init__(self, engine: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(engine, method, args, kwargs)
        self.kind = method.__name__
        self._source: Any = kwargs.pop("data_iter") if "data_iter" in kwargs else next(iter(args), None)
        self.args = args[1:]
        self._drawn: list[tuple[Any, dict[str, Any]]] = []
        """Batches, and the random states after each: a loader that begins its data anew draws a seed."""

    def execute(self) -> Any:
        """The batches drawn before, then new ones."""
        if self._source is None:
            self._source = self.engine.data_iterator
        if self._source is None:  # a stage that reads no data
            return self.method(None, *self.args, **self.kwargs)
        feed, before = self._feed(), self.engine.data_iterator
        try:
            result = self.method(feed, *self.args, **self.kwargs)
        except BaseException:
            # An evaluation keeps the training data where nobody finds them again once it is abandoned.
            self.engine.data_iterator = before
            raise
        if self.engine.data_iterator is feed:
            self.engine.data_iterator = self._source
        return result

    def answer(self, results: Results, number: int) -> Any:
        """Draw as many as the engine would."""
        engine, source = self.engine, self._source if self._source is not None else self.engine.data_iterator
        many = self.kwargs.get("num_micro_batches") or engine.micro_batches
        engine.module.train(self.kind == "train_batch")
        if source is not None and (engine.is_first_stage() or engine.is_last_stage()):
            for _ in itertools.islice(source, many):
                pass
        return super().answer(results, number)

    @property
    def ends_step(self) -> bool:
        """A training batch is a step."""
        return self.kind == "train_batch"

    def _feed(self) -> Iterator[Any]:
        for batch, states in self._drawn:
            rng.restore(states)
            yield copied(batch)
        for batch in self._source:
            self._drawn.append((copied(batch), rng.capture()))
            yield batch


class Reduction(Call):
    """The end of `coalesce_grad_reduction`: the gradients of all backward passes in it are reduced."""

    kind = "reduction"


class Load(Call):
    """`load_checkpoint` once training has begun: done again as a whole, from the same files."""

    kind = "load"


class Save(Call):
    """`save_checkpoint` and its like: done again as a whole, so that the files are of one piece, with what
    the script had to save then: it may have changed that since."""

    kind = "save"

    def execute(self) -> Any:
        """Save, and keep what there was to save."""
        keep = partial(_as_it_is, {})
        self._then = pytree.tree_map(keep, (self.args, self.kwargs))
        self._loop = dict[str, Any]()
        for name in _LOOP if _is_trainer(self.args) else ():
            self._loop[name] = then = copy.copy(getattr(self.args[0], name))
            vars(then).update(pytree.tree_map(keep, vars(then)))
        return super().execute()

    def repeat(self) -> Any:
        """Save that once more."""
        if not self.given:
            return super().execute()
        args, kwargs = self._then
        with replaced(args[0], dict(self._loop)) if self._loop else contextlib.nullcontext():
            return self.method(*args, **kwargs)

    def answer(self, results: Results, number: int) -> Any:
        """The files are there, or have been removed since, and the state in memory is a later one. A script
        that moves or removes what it has saved sees a directory (`ft_core.overlay`)."""
        if self.method.__name__ == "save_checkpoint":
            given = inspect.signature(self.method).bind(*self.args, **self.kwargs).arguments
            tag = given.get("tag") or f"global_step{self.engine.global_steps}"
            os.makedirs(os.path.join(given["save_dir"], str(tag)), exist_ok=True)
        return True


def _is_trainer(args: tuple[Any, ...]) -> bool:
    return bool(args) and getattr(args[0], "__dict__", {}).keys() >= _LOOP


def _as_it_is(memo: dict[int, Any], value: Any) -> Any:
    """A copy of what is plain data, or numbers of a kind; of the rest nobody knows what a copy would be."""
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        return value.detach().clone()
    plain = isinstance(value, (torch.Tensor, set, bytearray, np.ndarray, Namespace))
    return copy.deepcopy(value, memo) if plain else value


class ScriptPart:
    """The script's part of a backward pass: the graph from its losses to the engine's outputs."""

    def __init__(self, losses: list[torch.Tensor], forwards: list[Forward], engine: Any) -> None:
        self._losses = losses
        self.forwards, self.leaves, beside = _reached(losses, forwards, engine)
        self.objection = BESIDE if beside else ""
        for forward in self.forwards:
            forward.differentiated = True

    def outputs(self) -> list[torch.Tensor]:
        """The newest of the engine's that it begins at. Raises CannotRepeat."""
        if not all(forward.outputs for forward in self.forwards):
            raise CannotRepeat(_GONE)
        return [tensor for forward in self.forwards for tensor in forward.outputs]

    def gradients(self, scales: list[torch.Tensor] | None) -> list[torch.Tensor | None]:
        """At all outputs, as they were the first time; where that was interrupted before it began, now.

        Raises CannotRepeat where it was interrupted in the middle.
        """
        known = [f.gradients is not None for f in self.forwards]
        if not any(known):
            ends = [f.edges for f in self.forwards]
            edges = [edge for found in ends for edge in found]
            with torch.enable_grad():
                found = iter(torch.autograd.grad(self._losses, edges, scales, True, allow_unused=True))
                if self.leaves:  # the script trains something of its own
                    torch.autograd.backward(self._losses, scales, True, inputs=self.leaves)
            for forward, those in zip(self.forwards, ends, strict=True):
                forward.gradients = tuple(itertools.islice(found, len(those)))
        elif not all(known):
            raise CannotRepeat("a backward pass of several forward passes was interrupted in the middle")
        return [gradient for f in self.forwards for gradient in f.gradients or ()]

    def release(self) -> None:
        """It will not be run again."""
        self._losses, self.leaves = [], []
        for forward in self.forwards:
            forward.release()


def _reached(
    losses: list[torch.Tensor], forwards: list[Forward], engine: Any
) -> tuple[list[Forward], list[torch.Tensor], bool]:
    """Which of the forward passes these come from, which leaves besides, and whether they come from the
    engine's parameters by another way, too."""
    boundaries = {f.boundary: f for f in forwards}
    parameters: set[int] = set()
    found: list[Forward] = []
    leaves: list[torch.Tensor] = []
    beside = False
    seen: set[Any] = set()
    rest = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    while rest and not (beside and (len(found) == len(forwards) or len(seen) > _LOOKED_AT)):
        node: Any = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if (forward := boundaries.get(node)) is not None:
            found.append(forward)
        elif (variable := getattr(node, "variable", None)) is None:
            rest.extend(below for below, _ in node.next_functions if below is not None)
        elif id(variable) in (parameters := parameters or {id(p) for p in engine.module.parameters()}):
            beside = True  # seldom come to, and a walk through a model takes milliseconds
        else:
            leaves.append(variable)
    return [f for f in forwards if f in found], leaves, beside


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return one if other is None else other if one is None else one + other


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_of(value) if t.requires_grad]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """In whatever containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def copied(value: Any) -> Any:
    """With tensors of its own, which no graph leads to."""
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, value)

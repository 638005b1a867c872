"""What a model keeps in attributes and in buffers that no `state_dict` has.

A count of calls, a running mean, the longest sequence so far, a temperature that the script sets.

A pass changes it, so a pass that is made again must find it as the first one did, and a newcomer, which makes
none, is given it where its peers are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ft_deepspeed import values
from ft_deepspeed.values import FIXED, MISSING

log = logging.getLogger(__name__)

_TORCH = ("torch.nn.", "torch.ao.", "deepspeed.")
"""Modules of these are known to keep nothing of the kind but what a script sets: a rate of dropout, say."""
_DEEPSPEED = frozenset(
    "_external_params _original_parameters all_parameters applied_pre_backward_ref_cnt "
    "ds_external_parameters ds_grads_remaining ds_id ds_inflight_param_registry ds_model_granularity "
    "ds_model_num_layers ds_model_num_params ds_recompute_parameters post_bwd_fn pre_bwd_fn to_empty".split()
)
"""Attributes that DeepSpeed gives modules (see `ft_deepspeed.abandon` for what changes of them)."""
_OTHERS = frozenset(vars(torch.nn.Module())) | _DEEPSPEED
"""Attributes of modules that are not the script's own."""
_TORCHS = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.empty(0))]))) | {"_opt_called"}
"""Attributes that each optimizer has, the last one once a schedule goes by it."""

_COUNT = "micro_offset"
"""A pipeline's passes, by which its layers are seeded (`PipelineModule(seed_layers=True)`)."""

_OF_OPTIMIZER = "optimizer."

Modes = list[tuple[Any, str, bool]]
"""Modules and parameters, and what each has in the attribute that says whether it trains."""
Place = tuple[str, dict[str, Any], str]
"""Its name, and the dictionary and key that it is found by."""


class Captured(dict[str, Any]):
    """What is other than it was in the beginning, by name, as plain data.

    In the process where it was taken it also has the objects that were there, and the names of all
    attributes. What has been in an envelope has neither.
    """

    def __init__(
        self, changed: dict[str, Any], objects: dict[values.Path, Any], present: frozenset[str]
    ) -> None:
        super().__init__(changed)
        self.objects, self.present = objects, present


class ModuleState:
    """The state of one model's attributes, and its optimizer's. Values that stay what they were when training
    began are not kept."""

    def __init__(self, module: torch.nn.Module, optimizer: Any = None, schedule: Any = None) -> None:
        """`module`: as the script begins training with it. `optimizer`, `schedule`: those that step it."""
        self._all, self._parameters = list(module.modules()), list(module.parameters())
        self._now: list[bool] = []
        self._modes: Modes = []
        self._modules = [
            (name, part)
            for name, part in module.named_modules()
            if not _is_torchs_module(part) or [*_hidden(part)] or [*_rates(part)]
        ]
        self._late = {name: [*_hidden(part)] for name, part in self._modules}
        """Buffers that no `state_dict` has, or that were not there yet, by the module's name."""
        self._spaces = {
            _prefix(name): vars(part) for name, part in self._modules if not _is_torchs_module(part)
        }
        """Where attributes of the script's own are, by how their names begin. What torch knows of an
        optimizer is kept elsewhere."""
        if optimizer is not None and not _is_torchs(optimizer):
            self._spaces[_OF_OPTIMIZER] = vars(optimizer)
        self._places: list[Place] = []
        self._present: frozenset[str] = frozenset()
        self._sizes: list[int] = []
        self._seen: list[Any] = []
        """What was found last at each place, what was in it, and what was taken of it."""
        self._flat: list[values.Flat | None] = []
        self._taken: list[Any] = []
        self._first: dict[str, Any] = {}
        self._changed: dict[str, Any] = {}
        self._schedule: list[Place] = []
        """What a schedule shares with the model; the rest of it is kept elsewhere."""
        self._look = values.Look()
        self._find()
        self._take()
        if hasattr(schedule, "__dict__"):
            shared = set(map(id, self._look.objects.values()))
            self._schedule = [
                (f"schedule.{key}", vars(schedule), key)
                for key, value in vars(schedule).items()
                if id(value) in shared and values.is_plain(value)
            ]
            self._sizes = []
            self._find()
            self._take()
        self._first, self._changed = self._changed, {}
        self._began = self._look.objects

    def modes(self) -> Modes:
        """Which parts of the model train: some may be kept in evaluation mode all the time, or be frozen."""
        now = [*(part.training for part in self._all), *(p.requires_grad for p in self._parameters)]
        if now != self._now:  # nearly all calls have the same, and keep it
            self._now = now
            self._modes = modes(self._all) + [(p, "requires_grad", p.requires_grad) for p in self._parameters]
        return self._modes

    def capture(self) -> Captured:
        """What is other than it was in the beginning, by name."""
        self._find()
        self._take()
        return Captured(self._changed, self._look.objects, self._present)

    def restore(self, changed: dict[str, Any]) -> None:
        """Put back what `capture` returned, and the rest as it was in the beginning."""
        self._find()
        here = changed if isinstance(changed, Captured) else None  # no envelope
        places = {name: (space, key) for name, space, key in self._places}
        rest = {name: changed.get(name, self._first.get(name, MISSING)) for name in [*places, *changed]}
        giving = values.Giving(here.objects if here else {}, self._began, lambda name: put(name))

        def put(name: str) -> None:
            state = rest.pop(name, MISSING)
            space, key = places.get(name) or self._made_for(name)
            before = space.get(key, MISSING)
            if state is MISSING:
                if here is not None and name in self._present - here.present:
                    space.pop(key, None)  # it came with a pass that is made again
                return
            if isinstance(state, dict) and state == values.LEFT:
                if here is None:
                    log.warning("a newcomer's %s is not what its peers have: it has become too large", name)
                return
            try:
                value = giving.give(state, (name,), before)
            except LookupError as error:
                log.warning("a newcomer's %s is not what its peers have: it is %s", name, error)
                return
            if value is not before:
                space[key] = value

        for name in list(rest):
            put(name)

    def _made_for(self, name: str) -> tuple[dict[str, Any], str]:
        """Where an attribute belongs that a pass has made elsewhere."""
        prefix, dot, key = name.rpartition(".")
        return self._spaces.get(prefix + dot, {}), key

    def _find(self) -> None:
        optimizer = self._spaces.get(_OF_OPTIMIZER, {})
        sizes = [*(len(vars(part)) for _, part in self._modules), len(optimizer)]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        self._places = [
            place for name, part in self._modules for place in _places(name, part, self._late[name])
        ]
        self._places += [
            (f"{_OF_OPTIMIZER}{key}", optimizer, key)
            for key, value in optimizer.items()
            if key not in _TORCHS and values.is_plain(value)
        ]
        self._present = frozenset(prefix + key for prefix, space in self._spaces.items() for key in space)
        self._places += self._schedule
        self._seen = [MISSING] * len(self._places)
        self._flat = [None] * len(self._places)
        self._taken = [MISSING] * len(self._places)
        self._changed = {}

    def _take(self) -> None:
        self._look = look = values.Look(self._look)
        seen, flat, taken = self._seen, self._flat, self._taken
        for at, (name, space, key) in enumerate(self._places):
            value = space.get(key, MISSING)
            if value is seen[at]:
                if type(value) in FIXED:  # nearly all of them
                    continue
                if (content := flat[at]) is not None and look.is_unchanged(value, content, (name,)):
                    continue
            seen[at] = value
            found = look.taken(value, (name,))
            flat[at] = values.flat(value) if values.is_first(found) else None
            if found is MISSING and value is not MISSING and name in self._first:
                found = values.LEFT
            if found is taken[at] and found is not MISSING:
                continue
            taken[at] = found
            if found is MISSING or values.same(self._first.get(name, MISSING), found):
                self._changed.pop(name, None)
            else:
                self._changed[name] = found


def _is_torchs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith(("torch.", "deepspeed."))


def saved_buffers(module: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a model's buffers are that its `state_dict` has, and their names. Scripted parts keep theirs
    elsewhere."""
    return [
        (part._buffers, name)
        for part in module.modules()
        if isinstance(part._buffers, dict)
        for name in part._buffers.keys() - part._non_persistent_buffers_set
    ]


def modes(parts: Iterable[torch.nn.Module]) -> Modes:
    """In what mode they are."""
    return [(part, "training", part.training) for part in parts]


def set_modes(found: Modes) -> None:
    """Put them back into the mode that they were in."""
    for part, name, value in found:
        if getattr(part, name) != value:
            setattr(part, name, value)


def _is_torchs_module(part: torch.nn.Module) -> bool:
    return type(part).__module__.startswith(_TORCH)


def _rates(part: torch.nn.Module) -> Iterator[str]:
    return (key for key, value in vars(part).items() if type(value) is float and key not in _OTHERS)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _hidden(part: torch.nn.Module) -> Iterator[str]:
    yield from part._non_persistent_buffers_set
    for key, value in part._buffers.items():
        if value is None and key not in part._non_persistent_buffers_set:
            yield key
    if _COUNT in vars(part):
        yield _COUNT


def _places(name: str, part: torch.nn.Module, hidden: list[str]) -> Iterator[Place]:
    prefix, space = _prefix(name), vars(part)
    if _is_torchs_module(part):
        for key in _rates(part):
            yield f"{prefix}{key}", space, key
    else:
        for key, value in space.items():
            if key not in _OTHERS and values.is_plain(value):
                yield f"{prefix}{key}", space, key
    for key in sorted({*part._non_persistent_buffers_set, *hidden}):
        if key == _COUNT and key in vars(part):
            yield f"{prefix}{key}", space, key
        else:
            yield f"{prefix}{key}", part._buffers, key

"""DeepSpeed's state together with the script's: the results that it was given, and what it has named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from msgspec import structs

from ft_core.adapter import Maker, Redundancy, State, StateTensor
from ft_core.elastic.rules import Deal, Membership
from ft_core.kept import Kept
from ft_core.protocol.messages import Dealt
from ft_deepspeed.history import NAME as HISTORY
from ft_deepspeed.results import Results
from ft_deepspeed.script import Script
from ft_deepspeed.state import DeepSpeedAdapter
from ft_deepspeed.trainer import HISTORY as LOGGED


class ProtectedState:
    """DeepSpeed's state and the results that the script was given (see `ft_core.adapter.Adapter`)."""

    maker = Maker("DeepSpeed", deepspeed.__version__, "a script in place", 1)

    def __init__(
        self, engine: DeepSpeedAdapter, script: Script, shrink: bool, interrupted: Callable[[], None]
    ) -> None:
        """`interrupted`: told that a call is abandoned, before the engine forgets it."""
        self._interrupted = interrupted
        self._engine, self._script = engine, script
        self.ring = engine.ring
        self.replica_group = engine.replica_group
        if not shrink:
            self.replica_group = structs.replace(engine.replica_group, redundancy=Redundancy.SHARDED)
        self.loaded: Any = None
        self._history: torch.Tensor | None = None
        self.kept = Kept()
        """What a newcomer's script is given when it is where the engine is."""
        self._adopted: dict[int, AdoptedState] = {}

    def tensors(self) -> Iterable[StateTensor]:
        yield from self._engine.tensors()
        yield from self.kept_tensors(self.envelope_holders())

    def kept_tensors(self, holders: tuple[int, ...]) -> Iterable[StateTensor]:
        """Until a newcomer's script is where the engine is, what it is to be given there; and the record."""
        loaded = not self._script.live and self.loaded is not None
        yield from (self.kept if loaded else self._script.kept).tensors(holders)
        yield from self._script.results.history.tensors(holders)
        if self._script.loop is not None:
            yield from self._script.loop.tensors(holders)

    def envelope(self) -> Any:
        loop = self._script.loop
        return {
            "engine": self._engine.envelope(),
            "results": self._script.results.state(),
            "draws": self._script.draws.state(),
            "loads": self._script.loads.state(),
            "deal": self._script.deal(),
            "began": self._script.began,
            "first": self._script.first,
            "since": self._script.since,
            "machine": self._script.machine,
            "module": self._script.module.capture(),
            "loop": loop.envelope(self._script.session.version) if loop is not None else None,
            "references": self._script.references.state(),
        }

    def between(self) -> dict[str, Any]:
        """What `settle` puts back."""
        return {"engine": self._engine.envelope(), "module": self._script.module.capture()}

    def envelope_holders(self) -> tuple[int, ...]:
        return self._engine.envelope_holders()

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        with torch.inference_mode(False):  # the script may have been evaluating
            self._engine.restore(tensors, envelope["engine"])
            self._script.module.restore(envelope.get("module", {}))
            if not self._script.live:  # a survivor's script has its own, as it left it
                self.kept = Kept(tensors)
                if self._script.loop is not None:
                    self._script.loop.loaded(envelope.get("loop"), tensors.get(LOGGED))
        self.loaded = envelope
        found = tensors.get(HISTORY)
        self._history = None if found is None else found.detach().cpu().clone()

    def stepped(self) -> Iterator[torch.Tensor]:
        """What a step changes of the engine."""
        return self._engine.stepped()

    def dealt_after(self, version: int, membership: Membership) -> Iterator[tuple[int, Dealt]]:
        saved = self.loaded["deal"] if self._script.leads_group and self.loaded else None
        if saved is not None:
            yield from Deal.from_json(saved["deal"]).entries_after(version, membership)

    def results(self) -> Results:
        """The results of the role, as they were when what was loaded was saved. Raises CorruptSnapshot."""
        return Results(self.loaded["results"], self._history)

    def adopt(self, roles: Sequence[int]) -> Mapping[int, State]:
        before = self._adopted
        self._adopted = {}
        adopts = self.replica_group.redundancy is Redundancy.ADOPTABLE
        for role, state in (self._engine.adopt(roles) if adopts else {}).items():
            held = before.get(role)
            self._adopted[role] = held if held and held.state is state else AdoptedState(state, self)
        return self._adopted

    def settle(self, envelope: Any) -> None:
        """Put back what is no tensor: counters, random states, schedules, attributes of the model."""
        self._engine.settle(envelope["engine"])
        self._script.module.restore(envelope.get("module", {}))

    def derive(self) -> None:
        """Weights that no snapshot has; see `DeepSpeedAdapter.derive`."""
        with torch.inference_mode(False):
            self._engine.derive()

    def compare(self) -> None:
        """Before a version is staged; see `DeepSpeedAdapter.compare`."""
        self._engine.compare()

    def arrived(self) -> None:
        """The script is where the engine is; see `DeepSpeedAdapter.arrived`."""
        self._engine.arrived()

    def passed(self) -> None:
        """A newcomer's call was answered; see `DeepSpeedAdapter.passed`."""
        self._engine.passed()

    def reset(self) -> None:
        self._interrupted()
        self._engine.reset()


class AdoptedState:
    """What a role that is away had alone, and the results that its counterpart's script was given."""

    def __init__(self, state: State, adapter: ProtectedState) -> None:
        self.state, self._adapter = state, adapter

    def tensors(self) -> Iterable[StateTensor]:
        yield from self.state.tensors()
        yield from self._adapter.kept_tensors(self.envelope_holders())

    def envelope(self) -> Any:
        return {**self._adapter.envelope(), "engine": self.state.envelope()}

    def envelope_holders(self) -> tuple[int, ...]:
        return self.state.envelope_holders()

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        with torch.inference_mode(False):
            self.state.restore(tensors, envelope["engine"])

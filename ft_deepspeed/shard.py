"""The part of a role's state that an optimizer steps: its masters, and what the optimizer keeps for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ft_core.adapter import StateTensor
from ft_core.errors import ConfigError
from ft_core.state.optimizer import restore_state
from ft_deepspeed.parts import Part
from ft_deepspeed.zero import Master

_HOST = torch.device("cpu")


class AdoptedShard:
    """What one role that is away had alone, held by another (see `ft_core.adapter.State`)."""

    _shard: Shard

    def __init__(self, adapter: Any, role: int) -> None:
        """`adapter`: the `DeepSpeedAdapter` of the role that holds it."""
        self._adapter, self._holders = adapter, (role,)
        self._frozen: list[tuple[str, torch.Tensor]] = []
        """By name, weights that no optimizer steps."""
        self._derived: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(tensor, what it is a copy or a rounding of)"""
        self.parts: list[Part] = []
        """The parts of the weights that all peers have whole."""

    def tensors(self) -> Iterator[StateTensor]:
        """The tensors as that role would have them; buffers as the role that holds them has them."""
        for name, tensor in self._frozen:
            yield StateTensor(name, tensor, self._holders)
        yield from self._adapter.buffers(self._holders)
        yield from self._shard.tensors()
        for part in self.parts if self._adapter.lean else ():
            yield from part.tensors(self._holders)

    def envelope(self) -> Any:
        """The envelope as that role would have it, which does the same as its counterpart."""
        return self._adapter.envelope() | self._shard.envelope()

    def envelope_holders(self) -> tuple[int, ...]:
        """Nobody has another like it."""
        return self._holders

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        """Copy a snapshot of that role into it. The own state of the role that holds it is there by then."""
        for name, tensor in self._frozen:
            tensor.copy_(tensors[name])
        self._shard.restore(tensors, envelope)
        for tensor, source in self._derived:
            tensor.data.copy_(source)
        for part in self.parts:
            part.restore(tensors, whole=not self._adapter.lacks_weights)


class Shard:
    """Masters of one role, and the state that optimizers keep for them."""

    def __init__(self, masters: Sequence[Master], optimizers: Callable[[], Sequence[Any]]) -> None:
        """`optimizers`: what has state by master, as its attribute `state`; new state goes to the first."""
        self._masters, self._optimizers = masters, optimizers

    def tensors(self) -> Iterator[StateTensor]:
        """Masters, unless other state determines them, each followed by what is kept for it."""
        for master in self._masters:
            if master.listed:
                yield StateTensor(f"master.{master.name}", master.tensor.data, master.holders)
            state = self._of(master)
            for key in sorted(k for k, v in state.items() if isinstance(v, torch.Tensor)):
                yield StateTensor(f"optimizer.{master.name}.{key}", state[key], master.holders)

    def envelope(self) -> dict[str, Any]:
        """What the optimizers keep that is no tensor, and which tensors are on the host though their master
        is not, as a step count may be."""
        scalars, on_host = {}, []
        for master in self._masters:
            state = self._of(master)
            if values := {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}:
                scalars[master.name] = values
            if master.tensor.device.type != "cpu":
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
                on_host += [f"{master.name}.{k}" for k, v in tensors.items() if v.device.type == "cpu"]
        return {"scalars": scalars, "on_host": on_host}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ConfigError for what another model has saved, or another layout: masters are known by their
        places alone, so those might fit as well."""
        own = {master.name: master.tensor.shape for master in self._masters}
        for full, tensor in tensors.items():
            kind, _, name = full.partition(".")
            if kind == "optimizer":
                same = ".".join(name.split(".")[:2]) in own
            else:
                same = kind != "master" or own.get(name) == tensor.shape
            if not same:
                raise ConfigError(
                    f"what was saved is of another model or another configuration of ZeRO: {full} differs; "
                    "go on with those that it was saved with, or give another durable directory"
                )

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Mapping[str, Any]) -> bool:
        """Put both back. Returns whether tensors were made or dropped, not only written."""
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, group, index, key = name.split(".", 3)
                kept.setdefault(f"{group}.{index}", {})[key] = tensor
        remade, on_host = False, set(envelope["on_host"])
        for master in self._masters:
            if (saved := tensors.get(f"master.{master.name}")) is not None:
                master.tensor.data.copy_(saved)
            scalars = envelope["scalars"].get(master.name, {})
            remade |= self._restore(master, kept.get(master.name, {}), scalars, on_host)
        return remade

    def complete(self) -> bool:
        """Whether there is state for every master, as after the optimizer's first step."""
        return all(self._of(master) for master in self._masters)

    def _of(self, master: Master) -> dict[str, Any]:
        for optimizer in self._optimizers():
            if state := optimizer.state.get(master.tensor):
                return state
        return {}

    def _restore(
        self, master: Master, kept: dict[str, torch.Tensor], scalars: dict[str, Any], host: set[str]
    ) -> bool:
        state = self._of(master)
        if not kept and not scalars:  # the snapshot is older than the optimizer's first step
            dropped = bool(state)
            for optimizer in self._optimizers():
                optimizer.state.pop(master.tensor, None)
            return dropped
        if not state:
            state = self._optimizers()[0].state.setdefault(master.tensor, {})

        def place(key: str, _: torch.Tensor) -> torch.device:
            return _HOST if f"{master.name}.{key}" in host else master.tensor.device

        return restore_state(state, kept, scalars, place)

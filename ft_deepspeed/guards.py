"""The engine's public methods, and torch's `backward`, replaced by guarded ones: each call of the script's
becomes a `Call`, which somebody else makes, or answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ft_core.errors import ConfigError
from ft_deepspeed import checkpoints, patched
from ft_deepspeed.calls import (
    Backward,
    Batch,
    Call,
    Direct,
    Forward,
    Load,
    Reduction,
    Save,
    ScriptPart,
    Step,
)
from ft_deepspeed.dealing import POLICY
from ft_deepspeed.resumption import Resumption
from ft_deepspeed.script import Script

Method = Callable[..., Any]


class Caller(Protocol):
    """Who makes the calls, see `ft_deepspeed.protection`."""

    @property
    def performing(self) -> bool:
        """Whether a call passes straight through, see `Protection`."""

    def call(self, call: Call) -> Any:
        """Make it, or answer it."""


class Guards:
    """Those of one engine."""

    def __init__(self, script: Script, caller: Caller) -> None:
        self._script, self._caller = script, caller
        self._engine = script.engine
        self._resumption = Resumption(script.engine, script.session)

    def install(self) -> None:
        """Put them in place."""
        engine = self._engine
        for patch, make in zip(patched.CALLS, (Forward, self._backward, Step), strict=True):
            patch.wrap(self._guard(make), of=engine)
        for patches, call in (
            (patched.BATCHES, Batch),
            (patched.REDUCTIONS, Reduction),
            (patched.SAVES, Save),
        ):
            for patch in patches:
                patch.wrap(self._guard(call), of=engine)
        patched.BACKWARD.wrap(self._guard_direct_backward)
        patched.LOAD.wrap(self._guard_load, of=engine)

    def _guard(self, make: Callable[..., Call]) -> Callable[[Method], Method]:
        def guarding(method: Method) -> Method:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                if self._caller.performing:
                    return method(*args, **kwargs)
                return self._caller.call(make(self._engine, method, args, kwargs))

            return guarded

        return guarding

    def save(self, method: Method) -> Method:
        """Guard a way to save of a class that trains with this engine."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._caller.performing or self._script.starting:
                return method(*args, **kwargs)
            return self._caller.call(Save(self._engine, method, args, kwargs))

        return guarded

    def _guard_load(self, load: Method) -> Method:
        engine, script, session = self._engine, self._script, self._script.session

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if self._caller.performing:
                return load(*args, **kwargs)
            if not script.starting:
                if script.dealing is not None:
                    raise ConfigError(
                        f"{POLICY} deals the samples of a job that goes forward: call engine.load_checkpoint "
                        "before the first step"
                    )
                return self._caller.call(Load(engine, load, args, kwargs))
            # A newcomer may find a checkpoint that was not there when its peers began. Its script goes on
            # from that step and is answered from there; the state itself comes from memory.
            with session.loading():
                path, client_state = load(*args, **kwargs)
            if session.joining and path is not None:
                session.in_place.has_loaded()
            self._resumption.loaded(load, *args, **kwargs)
            deal = client_state.pop(checkpoints.KEY, None) if client_state else None
            if script.dealing is not None and path is not None:
                script.dealing.resume(engine.global_steps, deal)
            return path, client_state

        return load_checkpoint

    def _guard_direct_backward(self, backward: Method) -> Method:
        """`loss.backward()` of what comes from the engine's outputs."""
        caller, script = self._caller, self._script

        def guarded(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            script.touched = False
            kwargs = {"retain_graph": retain_graph, "create_graph": create_graph, **kwargs}
            if caller.performing:
                backward(tensors, grad_tensors, *args, **kwargs)
                return
            losses = [t for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor)]
            part = ScriptPart(losses, script.forwards, self._engine)
            if not part.forwards:
                backward(tensors, grad_tensors, *args, **kwargs)
                if not script.touched:
                    return
            call = Direct(self._engine, backward, tensors, part, (grad_tensors, *args), kwargs)
            if not call.retained:
                script.forwards = [f for f in script.forwards if f not in part.forwards]
            caller.call(call)

        return guarded

    def _backward(self, engine: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Backward:
        call = Backward(engine, method, args, kwargs, self._script.forwards)
        if not kwargs.get("retain_graph"):
            self._script.forwards = []
        return call

"""Sees what a thread has torch do, and who calls compiled code, of which nothing is seen inside.

What compiles is not to notice who looks: code that torch compiles in a dispatch mode's presence is another,
and a function that it is called with for the first time may never be compiled. So there is no mode while
compiled code is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ft_deepspeed import patched

Operation = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class Below(TorchDispatchMode):
    """Gives the operations of one thread, below all modes of the script's, to a function that makes their
    results."""

    supports_higher_order_operators = True

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """It is not there when something is compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, to keep it from what it never meets

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._operation(func, args, kwargs or {})

    def begin(self) -> None:
        """For this thread, below all modes of the script's. `with` would say to all threads that this one has
        a mode."""
        above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        for mode in (self, *reversed(above)):
            _push_mode(mode)

    def end(self) -> bool:
        """Take it from this thread's modes, also where the script has put others upon it. Whether it was
        there."""
        if self not in _get_current_dispatch_mode_stack():
            return False
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        return True


class Compiler:
    """Calls a function before one that `torch.compile` has made is called. It is to `leave`: nothing of this
    is there when that compiles."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._original = patched.EVAL_FRAME.original()

    def follow(self) -> None:
        """From here on."""
        self._put(self._set_eval_frame, self._original)

    def leave(self) -> None:
        """Until then."""
        self._put(self._original, self._set_eval_frame)

    def _set_eval_frame(self, callback: Any) -> Any:
        """The first thing that such a function does. One that is to stay as it is has no callback."""
        function = sys._getframe(1).f_locals.get("self")
        if getattr(function, "callback", None) is not None:
            self._call()
        return self._original(callback)

    def _put(self, value: Any, instead: Any) -> None:
        if (module := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            for patch in patched.EVAL_FRAME_IMPORTED:
                if getattr(module, patch.name, None) == instead:
                    patch.replace(value)

"""What a loop of one's own forgets is found in its first two steps, and named."""

from __future__ import annotations

from ft_core import kept
from ft_core.adapter import Adapter
from ft_core.errors import ConfigError


class Calls:
    """Which calls a loop has made. A framework's loop makes them all in its first step, but for an optimizer
    that skips a step."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._steps = 0
        self._writes: dict[str, int] = {}
        """By tensor, how often it was changed in place when the first step was done."""
        self.waited = False
        """Whether `commit_wait` was called."""
        self.began = False
        """Whether `optimizer_begins` was."""

    def step_done(self) -> None:
        """Raises ConfigError in the second step, naming what is forgotten."""
        if self._steps >= 2:
            return
        self._steps += 1
        tensors = {item.name: item.tensor for item in self._adapter.tensors()}
        writes = {name: 0 if t.is_inference() else t._version for name, t in tensors.items()}
        if self._steps == 1:
            self._writes = writes
            return
        if not self.waited:
            raise ConfigError(
                "commit_wait was not called in two steps: without it there may be no version that all roles "
                "have after a failure. Call it in each step, before the barrier (see the tutorial)"
            )
        changed = [name for name, count in writes.items() if self._writes.get(name, count) != count]
        if not self.began and changed:
            raise ConfigError(
                f"optimizer_begins was not called in two steps, and the state ({changed[0]}) has changed: "
                "a half-changed state might be taken for whole after a failure. Call it in each step, after "
                "the barrier and before the optimizer's step (see the tutorial)"
            )
        names = kept.names()
        if names and not any(name.startswith(kept.PREFIX) for name in writes):
            raise ConfigError(
                f"keep({names[0]}=...) does nothing here: {type(self._adapter).__name__} lists no kept "
                "state. An adapter of one's own lists it in `tensors`, or takes it from ft_core.kept.Kept"
            )

"""What a loop of one's own forgets, found in its second step and named.

That `commit_wait` or `optimizer_begins` is never called cannot be told so: a step that is skipped calls
neither, and a state that was loaded between two steps has changed without them.
"""

from __future__ import annotations

from ft_core import kept
from ft_core.adapter import Adapter
from ft_core.errors import ConfigError


class KeepCalls:
    """The calls to `keep` that one role has made."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._steps = 0

    def step_done(self) -> None:
        """Raises ConfigError in the second step where `keep` was called, and the adapter lists nothing."""
        self._steps += 1
        if self._steps != 2 or not (names := kept.names()):
            return
        if not any(tensor.name.startswith(kept.PREFIX) for tensor in self._adapter.tensors()):
            raise ConfigError(
                f"keep({names[0]}=...) does nothing here: {type(self._adapter).__name__} lists no kept "
                "state. An adapter of one's own lists it in `tensors`, or takes it from ft_core.kept.Kept"
            )

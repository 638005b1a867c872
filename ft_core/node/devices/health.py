"""What a plugin says of a machine's health, and how it is asked. An entry point of the group `ft_core.health`
names a `Health`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from ft_core.node.notices.notice import plain
from ft_core.protocol.messages import DeviceAction, DeviceFinding, Symptom

_AT_ONCE = 64
"""Conditions of one plugin that are looked at."""


class Condition(NamedTuple):
    """Something that is wrong now."""

    name: str
    """The name by which it is known again, such as `link of mlx5_0`."""
    action: DeviceAction
    """What is to be done about it, once, when it begins."""
    device: int = -1
    """The index of the GPU that it is about; -1: the machine."""
    text: str = ""
    """What was seen, for people."""


Health = Callable[[], Iterable[Condition]]
"""Returns all that is wrong now. Called in a thread of its own, for which nobody waits, and not again before
it has returned."""


class Asked:
    """One plugin, and what it has said last."""

    def __init__(self, plugin: Health) -> None:
        self.name = f"{plugin.__module__}.{getattr(plugin, '__qualname__', type(plugin).__qualname__)}"
        self._plugin = plugin
        self._there: set[tuple[str, int]] = set()

    def news(self) -> list[DeviceFinding]:
        """Ask it: what is wrong that was not before. Raises whatever it does, and TypeError or ValueError for
        an answer that is none."""
        there, found = set[tuple[str, int]](), list[DeviceFinding]()
        for condition in islice(self._plugin(), _AT_ONCE):
            if not isinstance(condition, Condition):
                raise TypeError(f"it says {condition!r}, which is no {Condition.__name__}")
            name, device, action = str(condition.name), int(condition.device), DeviceAction(condition.action)
            there.add((name, device))
            if (name, device) not in self._there:
                about = Symptom.OTHER, 0, device, "", plain(str(condition.text))
                found.append(DeviceFinding(*about, name=plain(name), action=action))
        self._there = there
        return found

"""Whether this machine's InfiniBand ports, and RoCE ones, still have a link: a `health.Health`."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

from ft_core.node.devices.health import Condition
from ft_core.protocol.messages import DeviceAction

ROOT = "/sys/class/infiniband"
DOWN = 2
"""Looks in a row in which a port has no link before that is told. It only counts: a switch that starts again
takes the links of all its nodes, and where training needs one that is gone, its workers say so."""


class Links:
    """Ports that have had a link since somebody looks: others may not be in use."""

    def __init__(self, root: str = ROOT) -> None:
        self._root = Path(root)
        self._down: Counter[str] = Counter()
        """Ports that have had one, and for how many looks in a row they have had none."""
        self._lost: dict[str, int] = {}
        """How often they have lost it, ever."""

    def __call__(self) -> list[Condition]:
        """What is wrong now."""
        found = []
        for state in sorted(self._root.glob("*/ports/*/state")):
            name = f"{state.parts[-4]}:{state.parts[-2]}"
            try:
                said = state.read_text()
            except OSError:
                continue  # it is not there any more
            lost = self._lost.get(name)
            with contextlib.suppress(OSError, ValueError):  # it counts nothing
                lost = int((state.parent / "counters/link_downed").read_text())
            if "ACTIVE" in said:
                self._down[name] = 0
            elif name in self._down:
                self._down[name] += 1
            if self._down.get(name, 0) >= DOWN:
                found.append(Condition(f"link of {name} is down", DeviceAction.COUNT, text=said))
            if lost is not None:
                if lost > self._lost.get(name, lost):
                    text = f"{lost} times by now"
                    found.append(Condition(f"link of {name} was lost", DeviceAction.COUNT, text=text))
                self._lost[name] = lost
        return found

"""Asks all that may announce this machine's end, for as long as the agent lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ft_core.errors import ConfigError
from ft_core.node.events import Noticed
from ft_core.node.notices import which
from ft_core.node.notices.notice import LIMIT, Notice, Source

log = logging.getLogger(__name__)

PATIENCE = 3
"""Looks in a row that may fail before a person is told."""
SELDOM = 60.0
"""Seconds between two looks where nobody has answered yet."""


@dataclass
class _Watched:
    name: str
    source: Source
    named: bool
    """Whether the operator has named it: that it does not answer is said then."""
    notices: list[Notice] = field(default_factory=list)
    answered: bool = False
    failed: int = 0
    """Looks in a row."""


class Watch:
    """What is announced to one node."""

    def __init__(self, node: str, heard: Callable[[Noticed], None]) -> None:
        """`heard` is told when what is announced has changed."""
        self._node, self._heard = node, heard
        self._watched: list[_Watched] = []
        self._said: Notice | None = None

    async def serve(self, wanted: Sequence[str], nodes: int) -> None:
        """Watch until cancelled. `wanted`: whom to ask, as of `Settings.notices`. `nodes`: how many the job
        has."""
        try:
            found = which.sources(wanted, self._node, nodes)
        except ConfigError as error:
            log.error("node %s hears no notices: %s", self._node, error)
            return
        self._watched = [_Watched(*one) for one in found]
        async with asyncio.TaskGroup() as group:
            for watched in self._watched:
                group.create_task(self._ask(watched))

    async def agree(self) -> None:
        """Tell all that this machine may go."""
        for watched in self._watched:
            if watched.notices:
                try:
                    async with asyncio.timeout(2 * LIMIT):
                        await watched.source.agree()
                except (OSError, ValueError) as error:
                    log.warning("node %s: %s was not told: %s", self._node, watched.name, error)

    async def _ask(self, watched: _Watched) -> None:
        while True:
            try:
                watched.notices = await watched.source.look()
            except (OSError, ValueError) as error:
                self._failed(watched, error)
            else:
                self._answered(watched)
            often = watched.answered or watched.failed < PATIENCE
            await asyncio.sleep(watched.source.every if often else max(SELDOM, watched.source.every))

    def _answered(self, watched: _Watched) -> None:
        if watched.failed >= PATIENCE and watched.named:
            log.info("node %s: %s answers", self._node, watched.name)
        watched.answered, watched.failed = True, 0
        notices = [notice for each in self._watched for notice in each.notices]
        first = min(notices, key=lambda n: (n.at is None, n.at or 0.0, n.reason), default=None)
        if first == self._said:
            return
        self._said = first
        left = None if first is None or first.at is None else max(0.0, first.at - time.time())
        self._heard(Noticed("" if first is None else first.reason, left))

    def _failed(self, watched: _Watched, error: Exception) -> None:
        watched.failed += 1
        if watched.failed == PATIENCE and watched.named:
            log.warning(
                "node %s: --ft-notices %s does not answer, so what it announces is not known: %s",
                *(self._node, watched.name, error or type(error).__name__),
            )

"""What the loss of a rack would cost, said by one node for all: at the start, and whenever that changes."""

from __future__ import annotations

import asyncio

from ft_core.process.async_writer import say
from ft_core.protocol.messages import NodePlan
from ft_core.settings import Settings
from ft_core.state import exposure
from ft_core.state.placement import Places, spares_of


class RackLoss:
    """Says it on the console of the node that plays role 0."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._told = ""

    async def tell(self, plan: NodePlan, settings: Settings) -> None:
        """Something new of this plan, if there is. In a large job working it out takes a while."""
        if plan.roles.get(0) != self._node:
            return
        domains = {node: where.domain for node, where in plan.nodes.items()}
        places = Places(plan.roles, domains, spares_of(plan.nodes, plan.roles), settings.guarded)
        found = await asyncio.to_thread(exposure.levels, places, settings.replicas)
        well, text = exposure.sentence(found, settings.replicas)
        if text and text != self._told:
            self._told = text
            say(f"failure domains: {text}", "INFO" if well else "WARNING")

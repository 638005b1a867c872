"""Looks at this node's devices for as long as its agent lives. Nothing here waits for a device."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from ft_core import plugins
from ft_core.node.devices import gpus, nvml
from ft_core.node.devices.health import Asked
from ft_core.node.devices.infiniband import Links
from ft_core.node.devices.xids import ADVICE, Xids, XidSeen
from ft_core.node.events import DeviceFound
from ft_core.node.notices.daemon import aside
from ft_core.node.notices.notice import plain
from ft_core.protocol.messages import DeviceFinding, Symptom

log = logging.getLogger(__name__)
T = TypeVar("T")

EVERY = 5.0
"""Seconds between two looks at what NVML, or a plugin, says."""
_WAITING = 64
"""XIDs that are kept until it is known which GPUs are this node's."""
_ADVISED = re.compile(r"\bto 0x([0-9a-fA-F]{1,8})\b")


class DeviceWatch:
    """What the devices of one node report."""

    def __init__(self, xids: Xids, heard: Callable[[DeviceFound], None]) -> None:
        self._xids, self._heard = xids, heard
        self._ours: Mapping[str, int] | None = None
        """Place on the bus -> index; None where that is not known."""
        self._looked = False
        """Whether that has been looked up."""
        self._unplaced: deque[XidSeen] = deque(maxlen=_WAITING)
        """What was reported before."""

    async def serve(self, devices: int, every: float = EVERY) -> None:
        """Find out which GPUs are this node's, and ask NVML of them, if there is any, and all plugins, until
        this is cancelled. `devices`: how many its workers use."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        ours = self._ours = await _aside(lambda: gpus.by_bus(devices, visible), every)
        self._looked = True
        await asyncio.sleep(every)  # while workers start
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_nvml(ours, every))
            group.create_task(self._ask(Asked(Links()), every))
            try:
                found = await _aside(lambda: plugins.load(plugins.HEALTH), every)
            except Exception as error:  # it is others' code
                log.warning("no plugin for health is asked (entry points %s): %r", plugins.HEALTH, error)
                return
            for plugin in found:
                group.create_task(self._ask(Asked(plugin), every))

    async def _ask_nvml(self, ours: Mapping[str, int] | None, every: float) -> None:
        try:
            library = await _aside(lambda: nvml.opened(ours), every)
            while library is not None:
                for finding in await _aside(library.look, every):
                    self._heard(DeviceFound(finding))
                await asyncio.sleep(every)
        except Exception as error:  # it is others' code, of whatever version
            log.warning("NVML has failed, and is not asked for the health of GPUs any more: %r", error)

    async def _ask(self, asked: Asked, every: float) -> None:
        while True:
            try:
                found = await _aside(asked.news, every)
            except Exception as error:  # it is others' code
                log.warning("%s has failed, and is not asked for health any more: %r", asked.name, error)
                return
            for finding in found:
                self._heard(DeviceFound(finding))
            await asyncio.sleep(every)

    def look(self) -> None:
        """Whether anything has been reported. Never waits."""
        self._unplaced += self._xids.new()
        while self._looked and self._unplaced:
            seen = self._unplaced.popleft()
            if (finding := self._finding(seen)) is not None:
                self._heard(DeviceFound(finding))

    def _finding(self, seen: XidSeen) -> DeviceFinding | None:
        """None of another job's GPU."""
        device = -1 if self._ours is None else self._ours.get(seen.bus.lower())
        if device is None:
            return None
        symptom, number = Symptom.XID, seen.number
        if number == ADVICE and (advised := _ADVISED.search(seen.text)):
            symptom, number = Symptom.ADVICE, int(advised[1], 16)
        return DeviceFinding(symptom, number, device, plain(seen.bus), plain(seen.text))


async def _aside(call: Callable[[], T], every: float) -> T:
    """What `call` returns, or raises, in a thread, once there can be one: a machine that has no room for one
    has said nothing of its devices."""
    while True:
        try:
            return await aside(call)
        except BlockingIOError:
            await asyncio.sleep(every)

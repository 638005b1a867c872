"""The controller's answers to `ftctl`: status, state of a role, injected failures."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import msgspec

from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.messages import (
    AskStatus,
    Denied,
    DescribeRole,
    FromAgent,
    FromCtl,
    Inject,
    Injected,
    JobStatus,
    RoleDescribed,
    RoleStatus,
    SpareStatus,
    ToCtl,
)

if TYPE_CHECKING:
    from ft_core.control.controller import Controller

Message = dict[str, Any]

_ANSWER = 5.0
"""Seconds that an agent has to answer what `ftctl` asks of it."""


class Console:
    """Reads the controller; changes nothing in it but by sending an agent a kill."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        self._asked: dict[int, asyncio.Future[Message]] = {}

    async def serve(self, channel: AsyncChannel[FromAgent | FromCtl]) -> None:
        """Until the other side leaves."""
        while (request := await self._c.receive(channel)) is not None:
            try:
                await channel.send(await self._answer(request))
            except ConnectionError:
                return

    async def _answer(self, request: FromAgent | FromCtl) -> ToCtl:
        match request:
            case AskStatus():
                return self.status()
            case Inject():
                return self.inject(request)
            case DescribeRole(role):
                return await self.state(role)
        return Denied(f"{type(request).__name__} is no question of ftctl")

    def status(self) -> JobStatus:
        """The answer to `ftctl status`."""
        rows = []
        copies: dict[str, Message] = {}
        for node in self._c.nodes.values():
            for segment, versions in node.heartbeat.get("replicas", {}).items():
                copies.setdefault(segment, {})[node.name] = versions
        for role, name in self._c.plan.get("roles", {}).items():
            host = self._c.nodes.get(name)
            beat = host.heartbeat["roles"].get(role, {}) if host else {}
            segments = self._c.catalogue.get(role, {})
            rows.append(
                RoleStatus(
                    role=int(role),
                    node=name,
                    worker_pid=beat.get("pid"),
                    agent_pid=host.about["pid"] if host else None,
                    step=beat.get("step"),
                    tag=beat.get("tag"),
                    held=beat.get("held", []),
                    replicas={s: v for s, v in copies.items() if s in segments or s.startswith(f"{role}x1-")},
                    committed=beat.get("committed"),
                    waited_s=beat.get("waited_s"),
                    h2h_bytes=beat.get("h2h_bytes"),
                    h2h_snapshots=beat.get("h2h_snapshots"),
                )
            )
        busy = set(self._c.plan.get("roles", {}).values())
        spares = [
            SpareStatus(n.name, n.about["pid"], n.heartbeat["idle"])
            for n in self._c.nodes.values()
            if n.name not in busy
        ]
        finished = sorted(self._c.finished)
        return JobStatus(self._c.epoch, str(self._c.phase), os.getpid(), finished, rows, spares)

    async def state(self, role: int) -> RoleDescribed | Denied:
        """What a role's state consists of, by tensor: its agent knows."""
        node = self._c.nodes.get(self._c.plan.get("roles", {}).get(str(role), ""))
        if node is None:
            return Denied(f"role {role} has no live node")
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[role] = answer
        node.post({"type": "state", "role": role})
        try:
            found = await asyncio.wait_for(answer, _ANSWER)
        except TimeoutError:
            return Denied(f"node {node.name}, which plays role {role}, does not answer")
        about = {
            "state": {key: value for key, value in found.items() if key != "type"},
            "roles": self._c.plan["roles"],
            "nodes": self._c.plan["nodes"],
            "replicas": self._c.settings.replicas,
        }
        return msgspec.convert(about, RoleDescribed, str_keys=True)

    def inject(self, request: Inject) -> Injected | Denied:
        role = request.role
        name = self._c.plan.get("roles", {}).get(str(role)) if role is not None else request.node
        node = self._c.nodes.get(str(name))
        if node is None:
            return Denied(f"no such role or node: {role if role is not None else name}")
        self._c.event("injected", f"ftctl kill {'node ' + node.name if role is None else f'role {role}'}")
        node.post({"type": "kill", **({} if role is None else {"role": int(role)})})
        return Injected(node.name if role is None else role)

    def answered(self, message: Message) -> None:
        """An agent has answered `state`."""
        asked = self._asked.pop(int(message["role"]), None)
        if asked is not None and not asked.done():  # nobody waits for ever
            asked.set_result(message)

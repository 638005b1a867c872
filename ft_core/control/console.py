"""The controller's answers to `ftctl`: status, state of a role, injected failures."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from ft_core.protocol.async_channel import AsyncChannel

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

    async def serve(self, channel: AsyncChannel) -> None:
        """Until the other side leaves."""
        while (request := await self._c.receive(channel)) is not None:
            try:
                await channel.send(await self._answer(request))
            except ConnectionError:
                return

    async def _answer(self, request: Message) -> Message:
        kind, role = request.get("type"), request.get("role")
        if kind == "status":
            return self.status()
        if role is not None and type(role) is not int:
            return {"error": f"no such role: {role!r}"}
        if kind == "kill":
            return self.inject(request)
        if kind == "state" and role is not None:
            return await self.state(role)
        return {"error": f"unknown command {kind!r}"}

    def status(self) -> Message:
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
                {
                    "role": int(role),
                    "node": name,
                    "worker_pid": beat.get("pid"),
                    "agent_pid": host.about["pid"] if host else None,
                    "step": beat.get("step"),
                    "tag": beat.get("tag"),
                    "held": beat.get("held", []),
                    "replicas": {
                        s: v for s, v in copies.items() if s in segments or s.startswith(f"{role}x1-")
                    },
                    **{k: beat.get(k) for k in ("committed", "waited_s", "h2h_bytes", "h2h_snapshots")},
                }
            )
        busy = set(self._c.plan.get("roles", {}).values())
        spares = [
            {"node": n.name, "agent_pid": n.about["pid"], "idle": n.heartbeat["idle"]}
            for n in self._c.nodes.values()
            if n.name not in busy
        ]
        about = {"phase": self._c.phase, "controller_pid": os.getpid(), "finished": sorted(self._c.finished)}
        return {"epoch": self._c.epoch, "roles": rows, "spares": spares, **about}

    async def state(self, role: int) -> Message:
        """What a role's state consists of, by tensor: its agent knows."""
        node = self._c.nodes.get(self._c.plan.get("roles", {}).get(str(role), ""))
        if node is None:
            return {"error": f"role {role} has no live node"}
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[role] = answer
        node.post({"type": "state", "role": role})
        try:
            found = await asyncio.wait_for(answer, _ANSWER)
        except TimeoutError:
            return {"error": f"node {node.name}, which plays role {role}, does not answer"}
        places = {key: self._c.plan[key] for key in ("roles", "nodes")}
        return {**found, **places, "replicas": self._c.settings.replicas}

    def inject(self, request: Message) -> Message:
        role = request.get("role")
        name = self._c.plan.get("roles", {}).get(str(role)) if role is not None else request.get("node")
        node = self._c.nodes.get(str(name))
        if node is None:
            return {"error": f"no such role or node: {role if role is not None else name}"}
        self._c.event("injected", f"ftctl kill {'node ' + node.name if role is None else f'role {role}'}")
        node.post({"type": "kill", **({} if role is None else {"role": int(role)})})
        return {"killed": node.name if role is None else int(role)}

    def answered(self, message: Message) -> None:
        """An agent has answered `state`."""
        asked = self._asked.pop(int(message["role"]), None)
        if asked is not None and not asked.done():  # nobody waits for ever
            asked.set_result(message)

"""The controller: one process per job. Liveness, epochs, recovery decisions; control messages only.

Its state is soft: everything it knows it was told by the agents, and a new one learns it again from
their next greetings. Training does not notice its absence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ft_core.control import decision
from ft_core.control.checkpoints import Checkpoints
from ft_core.control.configuration import Configuration
from ft_core.control.console import Console
from ft_core.control.endings import Endings
from ft_core.control.groups import Groups
from ft_core.control.nodes import (
    Message,
    Node,
    alive,
    completed,
    copies,
    report,
    versions,
    where,
)
from ft_core.control.rejoin import Rejoin
from ft_core.elastic import ledger
from ft_core.elastic.ledger import Ledger
from ft_core.errors import FAILED, AuthenticationError, ConfigError, ProtocolError, Unrecoverable
from ft_core.process import collector, parent, sigterm
from ft_core.process.awake import AwakeClock
from ft_core.process.descriptors import check_limit
from ft_core.process.outlet import FileOutlet, console, log_to_console, say
from ft_core.process.refusals import Refusals
from ft_core.process.sigterm import ENDED, GRACE
from ft_core.process.tasks import Tasks
from ft_core.protocol import door
from ft_core.protocol import messages as protocol
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.messages import (
    FROM_CLIENT,
    AgentHello,
    CtlHello,
    FromAgent,
    FromCtl,
    Redundancy,
    ReplicaGroup,
    Shutdown,
)
from ft_core.protocol.provisional import from_agent, to_agent
from ft_core.protocol.sockets import listen
from ft_core.settings import Settings, read_secret

log = logging.getLogger(__name__)
Channel = AsyncChannel[FromAgent | FromCtl]

_TICK = 0.05
_FRAMES = re.compile(r'^  File ".*\n(?:    .*\n)*', re.M)
"""Of a traceback."""
# All limits below, and that of silence, are in time that this process was awake: what it missed by being
# stopped or held up is nobody else's fault.
_RETURN_GRACE = 0.3
"""Seconds that an agent whose connection broke has to come back before its node counts as lost."""
_SIGNAL_LAG = 0.02
"""Seconds in which this process notices a signal that it was sent before a message."""
_REBUILD_GRACE = 2.0
"""Seconds without news that a restarted controller waits for the nodes of the plan it was told of."""
_FORM_GRACE = 120.0
"""Seconds without a new node after which one that is missing at the start is replaced by a spare: images are
pulled and imports are done at each machine's own pace."""
_REPEAT = 1.0
"""Seconds after which a plan is sent again to a node that has not begun it, or another is asked for it."""
_STANDBY_GRACE = 20.0
"""Seconds that a healthy node has to bring up a standby before a crashed worker's role moves elsewhere."""
_PORT_RETRY = 0.2
_LAST_LINES = 3.0
"""Seconds that files, the console and the nodes have, each, to take what is still to be told at the end."""
FAILURES = 3
"""Controllers in a row that fail so before the job ends: the next one would meet the same again."""
_FUTILE = 8
"""Recoveries in a row without a step that nobody had done before, after which the job is stopped."""


class Phase(StrEnum):
    """What the job is doing, seen from here."""

    FORMING = "forming"
    REBUILDING = "rebuilding"
    RUNNING = "running"
    QUIESCING = "quiescing"
    WAITING = "waiting"
    DONE = "done"


class Controller:
    """State machine of one job."""

    def __init__(self, settings: Settings, job_dir: Path, failed_before: int | None = None) -> None:
        """`failed_before`: None for the job's first controller; else how many in a row have failed until now
        of an error of their own."""
        self.settings, self.job_dir, self._failed_before = settings, job_dir, failed_before
        self.secret = read_secret(job_dir)
        self.phase = Phase.FORMING
        self.epoch = 0
        self.plan: Message = {}
        self.nodes: dict[str, Node] = {}
        self.catalogue: dict[str, dict[str, list[int]]] = {}
        """Role -> its segments and their holders: what is lost without a trace must still be missed."""
        self.groups = Groups(settings.start)
        self.rejoin = Rejoin(self)
        self.endings = Endings(self)
        self._trained: list[Message] = []
        """What is still to be entered into the ledger."""
        self._events, self._samples = FileOutlet(job_dir / "events.jsonl"), FileOutlet(job_dir / ledger.NAME)
        self._refusals = Refusals(self._refused)
        self._ledger, self._ledgered = Ledger(self._samples.write), 0
        self.initial: int | None = None
        """The version that the script makes by itself; known once a role has reached training."""
        self.reached = 0
        """The newest version that any role is known to have had."""
        self._recorded = _recorded(job_dir / "events.jsonl")
        """Of events that come once an epoch, the newest epoch that has them."""
        self.clock = AwakeClock(2 * _TICK)
        self._arriving = 0
        """Connections that have not said yet who they are."""
        self._heard_at = 0.0
        """When somebody who knows the secret last came, or said who he is."""
        self._joined_at = 0.0
        """When the last node came that had not been there."""
        self._newest = 0
        """The epoch of the newest plan that is known to be somewhere."""
        self._asked_at, self._asked = 0.0, 0
        self._restored: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._reopened: set[int] = set()
        self._newcomers: set[int] = set()
        self._lost: dict[int, tuple[str, int]] = {}
        """Role -> node and pid of the worker that was lost last."""
        self._undone: list[tuple[str, list[int]]] = []
        """Failures, with their roles, that were heard of before it was known where all roles are."""
        self.finished: set[int] = set()
        self.console = Console(self)
        self.configuration = Configuration(self)
        self.checkpoints = Checkpoints(self)
        self._completed: dict[int, Message] = {}
        self._parts = 0
        """Parts of the script that every role has come to the end of."""
        self.released = False
        self._resumes = False
        """Whether the script, started again, goes on from a checkpoint of its own."""
        self._started_over = 0
        """The newest epoch in which all scripts were started again."""
        self._futile = self._goal = 0
        """Failures since any step was done that is newer than the goal; and that, the newest before them."""
        self._last_failure = ""
        self._ended_at = 0.0
        self._waiting_for = ""
        self._not_written = (0, -1)
        """The epoch and version of the last durable checkpoint that failed."""
        self._unprotected = settings.command.no_python
        self._suspicious: set[str] = set()
        """Nodes of which a worker, or the agent, saw a connection to a peer break in this epoch."""
        self._leaving = False
        """Whether SIGTERM has come: what ends because of it is not replaced."""
        self._done: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until the job ends. Returns its exit code. Raises what this process cannot cope with."""
        try:
            return await self._serve()
        finally:
            for outlet in (self._events, self._samples):
                outlet.close()
                if not await asyncio.to_thread(outlet.flush, _LAST_LINES):
                    log.error("%s: its last lines could not be written", self.job_dir / outlet.name)

    async def _serve(self) -> int:
        self._done = asyncio.get_running_loop().create_future()
        tasks = Tasks(self._fail)
        tasks.spawn(door.serve(await self._listen(), "the controller", self._accept))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave)
        tasks.spawn(self._tick())
        try:
            code = await self._done
            sigterm.ignore()
        finally:
            tasks.cancel()
        told = (node.channel.send(Shutdown(code)) for node in self.nodes.values())
        with contextlib.suppress(TimeoutError):  # of one that takes nothing any more
            async with asyncio.timeout(_LAST_LINES):
                await asyncio.gather(*told, return_exceptions=True)
        return code

    async def _listen(self) -> socket.socket:
        host, port = self.settings.controller.rsplit(":", 1)
        said = False
        while True:
            try:
                return listen(host, int(port))
            except OSError as error:
                if self._failed_before is None:
                    raise ConfigError(f"the controller cannot listen at {host}:{port}: {error}") from None
                if not said:  # training goes on meanwhile; whoever has the port may leave
                    log.warning("a new controller cannot listen at %s:%s yet: %s", host, port, error)
                said = True
            await asyncio.sleep(_PORT_RETRY)

    def _fail(self, error: Exception) -> None:
        """An error of this controller's own: a successor goes on from what the agents know, a few times."""
        assert self._done is not None
        if self._done.done():
            return
        if self._failed_before is None or self._failed_before + 1 < FAILURES:
            self._done.set_exception(error)
            return
        log.critical("this controller fails as well", exc_info=error)
        for node in self.nodes.values():  # now, since the connection that the error came by is closed next
            node.post({"type": "shutdown", "code": 1})
        self.end(1, f"{FAILURES} controllers in a row have failed, this one of {error!r}")

    def event(self, name: str, reason: str = "", roles: list[int] | None = None, **more: Any) -> None:
        """Write one line of `events.jsonl`."""
        line = {
            "event": name,
            "epoch": self.epoch,
            "monotonic": time.monotonic(),
            "time": time.time(),
            "roles": roles or [],
            "reason": reason,
            **more,
        }
        self._events.write(json.dumps(line) + "\n")

    def _once(self, name: str, **more: Any) -> None:
        """Record what comes once an epoch: those who tell of it tell a restarted controller again."""
        if self._recorded.get(name, 0) < self.epoch:
            self._recorded[name] = self.epoch
            self.event(name, **more)

    # -- connections ---------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection. Only what is wrong with the connection ends it; other errors end this process."""
        node: Node | None = None
        try:
            if (admitted := await self._admit(reader, writer)) is None:
                return
            channel, hello = admitted
            if isinstance(hello, CtlHello):
                await self.console.serve(channel)
                return
            node = self._greet(channel, from_agent(hello))
            while node is not None and (message := await self.receive(channel)) is not None:
                if isinstance(message, AgentHello | FromCtl):
                    self._refusals.add(f"{channel.peer} sent {type(message).__name__} in an agent's place")
                    break
                if node.name not in self.nodes:
                    break  # it is lost: what it had said before is of no use, and it will greet again
                node.seen = self.clock.now
                self._on_agent(node, from_agent(message))
        except asyncio.CancelledError:
            pass  # this controller ends
        except Exception as error:
            self._fail(error)
        finally:
            writer.close()
            if node is not None and self.nodes.get(node.name) is node:
                node.gone_since = self.clock.now

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Channel, AgentHello | CtlHello] | None:
        """Shake hands, and hear who it is."""
        self._arriving += 1
        try:
            channel = await AsyncChannel.accept(reader, writer, self.secret, FROM_CLIENT)
            self._heard_at = self.clock.now
            if (hello := await self.receive(channel)) is None:
                return None
            if not isinstance(hello, AgentHello | CtlHello):
                raise ProtocolError(f"{channel.peer} did not greet, but sent {type(hello).__name__}")
            return channel, hello
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
            return None
        finally:
            self._arriving -= 1

    def _encoded(self, message: Message) -> protocol.Message:
        return to_agent(message, self.plan, self.settings)

    async def receive(self, channel: Channel) -> FromAgent | FromCtl | None:
        """The next message; None at the end of the connection."""
        try:
            return await channel.recv()
        except ConnectionError:
            pass
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        return None

    def _refused(self, reason: str) -> None:
        log.warning("refused: %s", reason)
        self.event("refused", reason)

    def _greet(self, channel: Channel, hello: Message) -> Node | None:
        name = str(hello["node"])
        self._heard_at = self.clock.now
        node = Node(name, channel, hello, self.clock.now, self._encoded, holdings=hello)
        if self.phase is Phase.DONE and self._done is not None:  # it has come while the others are told
            node.post({"type": "shutdown", "code": self._done.result()})
            return None
        if self._given_up(node):
            return None
        node.heartbeat = {**hello, "roles": {}}
        known = self.nodes.get(name)
        if known is not None:
            known.channel.close()
        self.nodes[name] = node
        if node.epoch_begun > max(self._newest, self.plan.get("epoch", 0)):
            self.phase, self._newest, self._asked_at = Phase.REBUILDING, node.epoch_begun, -_REPEAT
        self.reached = max([self.reached, *versions(hello)])
        if self.phase in (Phase.FORMING, Phase.REBUILDING):
            self.epoch = max(self.epoch, int(hello["epoch"]), self.plan.get("epoch", 0))
        if hello["configured"] is not None:
            self.configuration.take(hello["configured"])
        self.configuration.tell(node)
        if known is None:
            self._joined_at = self.clock.now
            self.event("joined", node=name, agent_pid=hello["pid"], domain=hello["domain"])
            self.rejoin.news()
        self._hear(node)
        if self._parts:
            node.post({"type": "release", "parts": self._parts})
        self._remind(node, hello)
        if self.running:
            self._tell_of_nodes()
            node.post({"type": "nodes", "id": self.plan["id"], "nodes": self.plan["nodes"]})
        self.rejoin.back(node)
        self._decide_if_ready()  # a greeting is a report too
        return node

    def _given_up(self, node: Node) -> bool:
        """Whether a plan was made without this node since it began its own; if so, it is told.

        Its roles are played elsewhere then, and its state is of a past that may have been done again. A node
        that was thought lost and is back before any such plan takes part as if nothing had been.
        """
        if node.name in self.plan.get("nodes", {}) or node.about["begun"] in ("", self.plan.get("id")):
            return False
        if node.epoch_begun > self.plan.get("epoch", 0):
            return False
        reason = f"node {node.name} is back, too late: it joins again as a spare"
        self.event("given_up", reason, node=node.name)
        node.post({"type": "given_up"})
        return True

    def _take(self, plan: Message) -> None:
        """Of another controller, from an agent that has begun it."""
        if plan["epoch"] <= self.plan.get("epoch", 0):
            return  # several were asked
        self.catalogue = {**plan["catalogue"], **self.catalogue}
        self.initial, self.reached = plan["initial"], max(self.reached, plan["reached"])
        self._parts = max(self._parts, plan["parts"])
        self._resumes, self._started_over = plan["resumes"], plan["started_over"]
        self._futile, self._goal = plan["futile"]
        self.groups.take(plan["groups"])
        self._begin(plan)
        self.epoch = max(self.epoch, plan["epoch"])
        for node in [n for n in self.nodes.values() if self._given_up(n)]:
            node.channel.close()
            del self.nodes[node.name]

    @property
    def _planned(self) -> bool:
        """Whether the newest plan is here. Without it, a restarted controller understands little."""
        return self.plan.get("epoch", 0) >= self._newest

    def _hear(self, node: Node) -> None:
        """What was said before the plan was here, and with the greeting."""
        if self._planned:
            said, node.about["said"] = node.about["said"], []
            for message in said:
                self._on_agent(node, message)

    def _begin(self, plan: Message) -> None:
        self.plan = plan
        self._restored, self._stepped, self._reopened = {}, set(), set()
        self._newcomers = set(plan["newcomers"])

    def _remind(self, node: Node, shown: Message) -> None:
        """Say again what a node has not heard: its connection broke, or a controller died over saying it.

        `shown`: its greeting or heartbeat.
        """
        if self.phase in (Phase.FORMING, Phase.REBUILDING, Phase.DONE):
            return
        epoch, begun = int(shown["epoch"]), shown["begun"]
        split = begun != self.plan["id"] and begun.startswith(f"{self.epoch}-")
        if epoch > self.epoch or (split and self.running):
            self.epoch = max(self.epoch, epoch)
            self.end_epoch("detected", f"node {node.name} is in epoch {epoch} of another controller", [])
            return
        if epoch < self.epoch:
            node.post({"type": "abort", "epoch": self.epoch})
        here = {int(role) for role, name in self.plan["roles"].items() if name == node.name}
        if not self.running:
            for role in self.groups.withdrawn & set(map(int, shown["roles"])):
                node.post({"type": "kill", "role": role})
        elif begun != self.plan["id"]:
            if self.clock.now - node.planned > _REPEAT:
                self._send_plan(node)
        elif others := set(map(int, shown["roles"])) - here - self.rejoin.roles_on(node.name):
            # Of a group whose start was given up, perhaps by a former controller.
            node.post({"type": "withdraw", "roles": sorted(others)})

    def _tell_of_nodes(self) -> None:
        """Nodes without a role have come or gone in the epoch under way: they keep copies for others."""
        if not self.running:
            return
        here = where(self.nodes.values())
        known = self.plan["nodes"]
        gone = {name: None for name in set(known) - set(here) - set(self.plan["roles"].values())}
        changes = {name: about for name, about in here.items() if known.get(name) != about} | gone
        if changes:
            merged = {**known, **changes}
            self.plan["nodes"] = {name: about for name, about in merged.items() if about is not None}
            for node in self.nodes.values():
                node.post({"type": "nodes", "id": self.plan["id"], "nodes": changes})

    def _send_plan(self, node: Node) -> None:
        node.planned = self.clock.now
        node.post(self.plan)

    def _on_agent(self, node: Node, message: Message) -> None:
        kind, epoch = message["type"], message.get("epoch")
        if kind == "plan":
            self._take(message)
        elif kind == "heartbeat":
            node.heartbeat = message
            self._remind(node, message)
            self.rejoin.beat(node)
            node.holdings["idle"] = message["idle"]
            # Kept here, because a node that is lost takes what it said with it.
            self.reached = max([self.reached, *(int(b["step"]) for b in message["roles"].values())])
        elif kind == "idle":
            node.heartbeat["idle"] = node.holdings["idle"] = message["idle"]
            if self.phase is Phase.WAITING:
                self._decide_if_ready()
        elif kind == "holdings":
            node.holdings = message
            self.reached = max([self.reached, *versions(message)])
            node.heartbeat["idle"] = message["idle"]
            self._decide_if_ready()
        elif not self._planned:
            node.about["said"].append(message)
        elif kind == "worker_lost":
            self._worker_lost(node, message)
        elif kind == "short" and self.rejoin.concerns(int(message["role"])):
            self.rejoin.failed(f"no idle worker on {node.name}")
        elif kind in ("restore_failed", "short") and epoch == self.epoch:
            reason = str(message.get("reason", "no idle worker on its node"))
            self._failed(f"role {message['role']} on {node.name}: {reason}", [int(message["role"])])
        elif kind == "restored" and epoch == self.epoch:
            self._restored[int(message["role"])] = int(message["pid"])
            if len(self._restored) == len(self.plan["roles"]):
                self._once("state_restored", version=self.plan["version"], pids=self._restored)
        elif kind == "stepped" and epoch == self.epoch:
            self._stepped.add(int(message["role"]))
            self.reached = max(self.reached, int(message["version"]))
            if self._all_have_stepped:
                self.rejoin.succeeded()
                self._once("resumed", version=int(message["version"]))
        elif kind == "reopened" and epoch == self.epoch:
            self._reopened |= {int(message["role"])} - self._newcomers
            survivors = set(map(int, self.plan["roles"])) - self._newcomers
            if survivors and self._reopened == survivors:
                self._once("communicators_ready")
        elif kind == "configure":
            self.configuration.asked(node, message)
        elif kind == "configured":
            self.configuration.used(node, message)
        elif kind == "state":
            self.console.answered(message)
        elif kind == "layout":
            self._layout(message)
        elif kind == "trained":
            self._enter(message)
        elif kind == "counts":
            self.rejoin.counted(node, message)
        elif kind == "issued":
            self.endings.answered(message)
        elif kind == "prepared":
            self.rejoin.prepared(int(message["role"]))
        elif kind == "held" and epoch == self.epoch:
            self.rejoin.held(int(message["role"]))
        elif kind == "unprotected":
            self._unprotected = True
        elif kind == "suspect":
            if epoch == self.epoch:
                self._suspicious.add(node.name)
            self.event("suspected", str(message["reason"]), [int(message["role"])])
        elif kind == "durable_list":
            self.checkpoints.answered(node, message)
        elif kind == "durable":
            self.event("durable", roles=[int(message["role"])], version=message["version"])
        elif kind == "durable_failed":
            self._durable_failed(node, message)
        elif kind == "completed":
            self._completed[int(message["role"])] = message
            self._release_if_complete()
        elif kind == "finished":
            self.finished.add(int(message["role"]))
            self._end_if_finished()
        elif kind == "leaving":
            self.event("leaving", f"node {node.name} was told to end (SIGTERM)", node=node.name)
            if not self._leaving and node.name not in self.plan.get("roles", {}).values():
                node.post({"type": "shutdown", "code": ENDED})
        elif kind == "left":
            # Where `ftrun` has told all, this process was first, but may read the signal after the message.
            asyncio.get_running_loop().call_later(_SIGNAL_LAG, self._node_left, node)

    def _layout(self, message: Message) -> None:
        """What a role's state consists of; or the part that another has adopted."""
        role = str(message["role"])
        if message["epoch"] < self._started_over:
            return
        if message["adopted"]:
            self.catalogue[role] = {**self.catalogue.get(role, {}), **message["segments"]}
            return
        self.catalogue[role] = message["segments"]
        self.initial, self._resumes = message["initial"], message["resumes"]
        self.groups.register(int(role), msgspec.convert(message["group"], ReplicaGroup))

    def _durable_failed(self, node: Node, message: Message) -> None:
        """One event a checkpoint: the other roles' parts fail of the same, or because this one did."""
        version = int(message["version"])
        if (self.epoch, version) != self._not_written:
            self._not_written = (self.epoch, version)
            reason = f"node {node.name}: {message['reason']}"
            self.event("durable_failed", reason, [int(message["role"])], version=version)

    def _open_ledger(self) -> None:
        """Enter that an epoch has begun; later for the first, in which roles tell of their groups."""
        if self._ledgered != self.plan["epoch"] and self.groups.known:
            self._ledgered = self.plan["epoch"]
            self._ledger.epoch(self._ledgered, self.plan["version"], self.groups.membership.to_json())

    def _enter(self, trained: Message) -> None:
        """In the ledger: a role has trained a step's samples."""
        self._trained.append(trained)
        if not self.groups.known:
            return  # word of another role's group is on its way
        self._open_ledger()
        for message in self._trained:
            if (problem := self._ledger.step(message)) is not None:
                log.error("%s", problem)
                self.event("ledger", problem)
        self._trained.clear()

    @property
    def _all_have_stepped(self) -> bool:
        return len(self._stepped) == len(self.plan["roles"])

    def _end_if_finished(self) -> bool:
        if not {int(role) for role in self.plan["roles"]} <= self.finished:
            return False
        self.end(0, "every role has finished")
        return True

    def _release_if_complete(self) -> None:
        """Let the workers leave a part of their scripts, once all have come to the end of it."""
        left = set(map(int, self.plan["roles"])) - self.finished
        done = [self._completed[role] for role in left & self._at_end]
        if self.phase is not Phase.RUNNING or not done or len(done) < len(left):
            return
        self._parts = max(self._parts, min(int(c["part"]) for c in done))
        self.released = all(c["last"] for c in done)
        for node in self.nodes.values():
            node.post({"type": "release", "parts": self._parts})

    @property
    def _at_end(self) -> set[int]:
        """Roles that wait for the others at the end of a part, or of their script."""
        epoch = self.plan.get("epoch")
        new = {r for r, c in self._completed.items() if c["epoch"] == epoch and c["part"] > self._parts}
        return new | self.finished

    # -- settings that the script brings -------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether an epoch is under way: neither ending nor yet to be decided."""
        return self.phase is Phase.RUNNING

    def start_from(self, version: int) -> bool:
        """Begin with a durable checkpoint after all. False if the job has begun with one, or has trained."""
        if self.initial is not None or self.plan["start"][1] == "durable":
            return False
        self.plan["start"] = [version, "durable"]
        self.end_epoch("configured", f"training starts from the durable checkpoint of step {version}", [])
        return True

    # -- failures ------------------------------------------------------------------------------

    def _worker_lost(self, node: Node, message: Message) -> None:
        role = int(message["role"])
        if self._lost.get(role) == (node.name, message["pid"]):
            return  # it is said again
        self._lost[role] = node.name, message["pid"]
        if self.rejoin.concerns(role):
            self.rejoin.failed(f"worker {message['pid']} of role {role} on {node.name}: {message['exit']}")
            return
        if (about := node.holdings["roles"].get(str(role))) is not None:
            about["alive"] = False  # though its node may have reported in this epoch that it lives
        where = f"worker {message['pid']} of role {role} on {node.name}: {message['exit']}"
        if message["crashed"]:
            self._failed(where, [role])
        elif message["code"]:
            self._script_failed(role, where, message["traceback"])
        elif self.initial is None or self._unprotected or self.released:
            self.finished.add(role)
            self._end_if_finished()
        else:
            self.end(1, f"{where}, in the middle of training (os._exit?): the others would wait for it")

    def _script_failed(self, role: int, where: str, said: str) -> None:
        """`said`: what the worker has told of it. A traceback is in its log, and shown from there."""
        short = _FRAMES.split(said)[-1].rstrip()
        if short != said.rstrip():
            short += f"\nIts traceback is in {self.job_dir}/logs/role-{role}/stderr.log"
        self.end(1, f"{where}\n{said}", f"{where}\n{short}")

    def _node_lost(self, node: Node, why: str) -> None:
        del self.nodes[node.name]
        node.channel.close()
        self.rejoin.node_lost(node.name)
        roles = [int(r) for r, where in self.plan.get("roles", {}).items() if where == node.name]
        if roles:
            self._failed(f"node {node.name} lost: {why}", roles)
        else:
            self.event("spare_lost", f"node {node.name}: {why}", node=node.name)
            self._tell_of_nodes()
            self._decide_if_ready()

    def _leave(self) -> None:
        """SIGTERM: `ftrun` has it from outside, and passes it on to the agents as well."""
        self._leaving = True
        if self.phase is Phase.FORMING:
            self.end(ENDED, "it was told to end (SIGTERM) before it had begun")

    def _node_left(self, node: Node) -> None:
        """All workers of a node have died of SIGTERM, which it had from outside."""
        if node.name not in self.nodes:
            return  # its connection has broken since, and that was enough
        if not self._leaving:
            self._node_lost(node, "it was told to end (SIGTERM)")
            return
        # The job ends, or at least this machine, and what is left is the business of the next controller.
        del self.nodes[node.name]
        if not set(self.plan["roles"].values()) & set(self.nodes):
            self.end(ENDED, "it was told to end (SIGTERM)")
        reason = f"it was told to end (SIGTERM); some workers handle that, but not those of {node.name}"
        asyncio.get_running_loop().call_later(GRACE, self.end, ENDED, reason)

    def _failed(self, reason: str, roles: list[int]) -> None:
        """A failure: end the epoch, unless it is ending already."""
        if self.phase is Phase.REBUILDING:
            self._undone.append((reason, roles))
            return
        if self.phase in (Phase.DONE, Phase.FORMING):
            self.event("detected", reason, roles)
            if self.phase is Phase.FORMING:
                self._form_if_ready()
            return
        if self.released:
            # Training is behind everybody: nothing is left to lose.
            self.event("detected", f"{reason}; its script had only local work left", roles)
            self.finished |= set(roles)
            self._end_if_finished()
            return
        if self.phase in (Phase.QUIESCING, Phase.WAITING):
            self.event("detected", reason, roles)
            self._decide_if_ready()
            return
        if self._unprotected:
            self.end(1, f"{reason}; the script runs without fault tolerance (--ft)")
            return
        self._futile, self._last_failure = self._futile + 1, reason
        self.end_epoch("detected", reason, roles)

    def end_epoch(self, event: str, reason: str, roles: list[int]) -> None:
        """Have all workers leave what they are in, and decide how to go on."""
        self.epoch += 1
        self._suspicious.clear()
        self.phase = Phase.QUIESCING
        self._ended_at = self.clock.now
        self.checkpoints.forget()
        self.event(event, reason, roles)
        for node in self.nodes.values():
            node.post({"type": "abort", "epoch": self.epoch})
        self._decide_if_ready()

    async def _tick(self) -> None:
        limit = self.settings.silence_limit
        while True:
            await asyncio.sleep(_TICK)
            if parent.gone():
                self.end(1, "ftrun is gone")
            now = self.clock.tick()
            for node in list(self.nodes.values()):
                # A peer that saw its connections break as well leaves no doubt.
                grace = 0.0 if self._suspicious - {node.name} else _RETURN_GRACE
                if node.gone_since is not None and now - node.gone_since > grace:
                    self._node_lost(node, "its agent's connection broke")
                elif now - node.seen > limit:
                    self._node_lost(node, f"no heartbeat for {limit:.1f} s")
            self._refusals.tick()
            self.configuration.settle()
            if self.phase is Phase.FORMING:
                self._form_if_ready()
            elif self.phase is Phase.REBUILDING:
                self._rebuild()
            elif self.phase is Phase.WAITING:
                self._decide_if_ready()
            if self.running:
                self.endings.tick(self._at_end)
            if self.running and self.settings.policy == "shrink":
                if self._all_have_stepped:
                    self.rejoin.tick()
                elif (late := self.rejoin.late(self._restored)) and self._restored:
                    self._go_on_without(late)

    # -- decisions -----------------------------------------------------------------------------

    def _form_if_ready(self) -> None:
        """The first epoch: node rank i plays roles i*n .. i*n+n-1; a spare, if that node does not come."""
        wanted, n = self.settings.first_nodes, self.settings.nproc_per_node
        ranked = {node.about["node_rank"]: node for node in self.nodes.values()}
        missing = [rank for rank in range(wanted) if rank not in ranked]
        if missing and self.clock.now - self._joined_at > _FORM_GRACE:
            spares = [s for s in self.nodes.values() if s.about["node_rank"] not in range(wanted)]
            ranked |= dict(zip(missing, spares, strict=False))
            self._tell_of_missing(missing[len(spares) :])
        first = [ranked.get(rank) for rank in range(wanted)]
        if any(node is None or node.heartbeat["idle"] < n for node in first):
            return
        places = (node.name for node in first if node for _ in range(n))
        roles = dict(zip(self.settings.start.present, places, strict=True))
        if (durable := self.checkpoints.common(set(roles.values()))) is None:
            return
        if (
            self.checkpoints.errors
        ):  # to begin anew, where there may be something to go on from, would be wrong
            where = f"durable checkpoints in {self.settings.durable_dir} cannot be read"
            self.end(1, f"{where}: {'; '.join(self.checkpoints.errors.values())}")
            return
        self.epoch += 1
        origin = "durable" if durable else "initial"
        self._start(roles, max(durable) if durable else None, origin, {}, {})

    def _tell_of_missing(self, ranks: list[int]) -> None:
        """Nodes of these ranks are missing at the start, and there are no spares for them."""
        which = ", ".join(map(str, ranks))
        what = f"the job waits to begin: there is no node of rank {which}, and no spare for it"
        if ranks and what != self._waiting_for:
            self._waiting_for = what
            self.event("waiting", what)
            log.warning("%s", what)

    def _rebuild(self) -> None:
        """A restarted controller, once it has heard from everybody, or it is clear who does not come."""
        self._newest = max((n.epoch_begun for n in self.nodes.values()), default=0)
        if not self._planned:
            if self.clock.now - self._asked_at >= _REPEAT:
                there = [n for n in self.nodes.values() if n.epoch_begun == self._newest]
                there[self._asked % len(there)].post({"type": "tell"})
                self._asked_at, self._asked = self.clock.now, self._asked + 1
            return
        for node in list(self.nodes.values()):
            self._hear(node)
        if not self.plan:
            self.phase = Phase.FORMING  # those who knew of a plan are gone again
            return
        quiet = self.clock.now - self._heard_at
        late = quiet > _REBUILD_GRACE and (not self._arriving or quiet > self.settings.silence_limit)
        if not late and set(self.plan["roles"].values()) - set(self.nodes):
            return
        self.phase = Phase.RUNNING
        if self.initial is not None and self.reached > self.initial:
            # Every role has had snapshots then, which the former controller heard of after it made that plan:
            # for a role whose node is gone, what others hold for it names its segments.
            for node in self.nodes.values():
                for segment, holders in node.holdings["segments"].items():
                    for role in holders:
                        self.catalogue.setdefault(str(role), {})[segment] = holders
        self.event("controller_restarted", f"plan of epoch {self.plan['epoch']} taken over")
        if self._end_if_finished():
            return
        self._release_if_complete()
        self.released |= any(self._completed[role]["last"] for role in self.finished & set(self._completed))
        # Nodes that have not begun this plan are sent it, and give its newcomers workers.
        behind = {n.name for n in self.nodes.values() if n.heartbeat["begun"] != self.plan["id"]}
        given = {int(r) for r, node in self.plan["roles"].items() if node in behind} & self._newcomers
        places = {int(r): node for r, node in self.plan["roles"].items() if int(r) not in given}
        dead = [role for role, node in places.items() if not alive(self.nodes, role, node)]
        for reason, roles in self._undone:
            self.event("detected", reason, roles)
        self._tell_of_nodes()
        if dead or self._undone or self.epoch > self.plan["epoch"]:
            self._failed("lost while the controller was away" if dead else "recovery was under way", dead)

    def reconsider(self) -> None:
        """More is known of the durable checkpoints."""
        if self.phase is Phase.FORMING:
            self._form_if_ready()
        self.configuration.settle()
        self._decide_if_ready()

    def _decide_if_ready(self) -> None:
        if self.phase not in (Phase.QUIESCING, Phase.WAITING):
            return
        if any(n.holdings["reported"] != self.epoch or n.gone_since is not None for n in self.nodes.values()):
            return
        if self.reached > self._goal:  # the failure is the first that comes after it
            self._futile, self._goal = min(self._futile, 1), self.reached
        if self._futile > _FUTILE:
            count = f"{_FUTILE} recoveries in a row without a new step after step {self._goal}"
            self.end(1, f"{count}; the last failure: {self._last_failure}")
            return
        withdrawn = self.groups.withdrawn
        places = {int(r): node for r, node in self.plan["roles"].items() if int(r) not in withdrawn}
        lost = [role for role, node in places.items() if not alive(self.nodes, role, node)]
        idle = {node.name: int(node.heartbeat["idle"]) for node in self.nodes.values()}
        crashed = Counter(places[role] for role in lost if places[role] in idle)
        if any(idle[node] < count for node, count in crashed.items()) and not self._standby_overdue():
            # A worker that crashed on a healthy node is restarted there; its standby is about to be up.
            self.phase = Phase.WAITING
            return
        capacity = self.settings.nproc_per_node
        near = copies(self.nodes.values(), self.catalogue, lost)
        assignment = decision.assign(places, idle, lost, capacity, near)
        roles = assignment.roles
        if assignment.unplaced:
            roles = self._shrink(roles, assignment.unplaced)
            if not roles:
                return
        elif self.settings.policy == "shrink":
            roles = {**roles, **self.rejoin.places}
        try:
            chosen = self._choose(roles, places)
        except Unrecoverable as error:
            if self._resumes and not self.groups.adopted(roles):
                self._start_over(str(error), roles, lost)
            else:
                unread = [f"\nCheckpoints cannot be read: {why}" for why in self.checkpoints.errors.values()]
                self.end(1, "".join([str(error), *unread, f"\nStart the job again; {self._advice()}"]))
            return
        if chosen is None:
            return
        version, origin, sources = chosen
        if origin == "initial" and (bare := self._never_copied(roles, sources)):
            if bare <= set(assignment.unplaced):
                self._wait(sorted(bare), "what they have alone has not been copied yet")
            else:
                self.end(1, f"what roles {sorted(bare)} had alone is lost; start the job again")
            return
        self._waiting_for = ""
        lost = sorted(role for role in roles if role in lost or role not in places)
        self._start(roles, version, origin, sources, completed(self.nodes.values(), roles), lost)

    def _never_copied(self, roles: Collection[int], sources: Message) -> set[int]:
        """Roles that are away, and began with the job, of whose state nobody has a copy.

        Those that were missing from the start have theirs made by the roles that adopt it.
        """
        began = set(self.settings.start.present)
        return {r for r in self.groups.adopted(roles) if r in began and not sources[str(r)]}

    def _shrink(self, placed: dict[int, str], unplaced: Collection[int]) -> dict[int, str]:
        """Policy `shrink`: the roles that go on without the groups of those that have no place, or none."""
        if self.settings.policy != "shrink":
            self._wait(list(unplaced))
            return {}
        left, reason = self.groups.without(placed, unplaced)
        if left:
            return left
        for role in self.groups.to_combine(placed, unplaced):
            self.groups.withdrawn.add(role)
            self.nodes[placed[role]].post({"type": "kill", "role": role})
        self._wait(list(unplaced), reason)
        return {}

    def _go_on_without(self, late: list[int]) -> None:
        """Replica groups that came back keep the others waiting: they leave once more, and try again."""
        roles = self.groups.roles(self.groups.of(late))
        self.groups.withdrawn |= set(roles)
        self.rejoin.give_up({role: self.plan["roles"][str(role)] for role in roles})
        limit = self.settings.return_limit
        self.end_epoch("not_returning", f"roles {late} did not have their state within {limit:g} s", roles)

    def _choose(
        self, roles: dict[int, str], places: dict[int, str]
    ) -> tuple[int | None, str, Message] | None:
        """What to go on from; None if that depends on durable checkpoints, which are being looked for."""
        catalogue = {name: held for found in self.catalogue.values() for name, held in found.items()}
        reports = [report(node, catalogue) for node in self.nodes.values()]
        if self.initial is None:
            # Nobody has ever reached training: start-up goes on towards what it was begun with.
            version, origin = self.plan["start"]
            if origin == "durable":
                # Unless the newest has turned out to be damaged, the same again.
                if (durable := self.checkpoints.common(set(roles.values()))) is None:
                    return None
                if not durable:
                    raise Unrecoverable(
                        f"Every durable checkpoint in {self.settings.durable_dir} is damaged (see the errors "
                        "above). Nothing has been trained since. To start without one, give another one."
                    )
                version = max(durable)
                self.plan["start"] = [version, origin]
            return version, origin, {}
        known = {int(role): set(found) for role, found in self.catalogue.items()}
        for role in set(roles) - set(places):  # of a group that comes back, or takes part for the first time
            counterpart = self.groups.counterpart(role, places)
            if self.groups.redundancy is Redundancy.REPLICATED:
                known[role] = known[counterpart]
            else:
                common = self.catalogue[str(counterpart)].items()
                known[role] = known.get(role, set()) | {name for name, held in common if role in held}
        adopted = self.groups.adopted(roles)
        for role in adopted:
            known[role] = self.groups.held_alone(role, self.catalogue.get(str(role), {}), roles)
        choose = partial(
            decision.choose_version,
            reports,
            [*roles, *adopted],
            self.initial,
            placements={**roles, **{role: roles[adopter] for role, adopter in adopted.items()}},
            previous=places,
            reached=self.reached,
            catalogue=known,
        )
        choice = None
        with contextlib.suppress(Unrecoverable):
            choice = choose(durable=())
        if choice is None or choice.origin != "memory":  # storage is asked only where memory does not suffice
            if (durable := self.checkpoints.common(set(roles.values()))) is None:
                return None
            choice = choose(durable=durable)
        sources = {str(role): found for role, found in choice.sources.items()}
        for role in adopted:  # without what its adopter has anyway
            found = sources[str(role)].items()
            sources[str(role)] = {s: nodes for s, nodes in found if s in known[role]}
        return choice.version, choice.origin, sources

    def _start_over(self, reason: str, roles: dict[int, str], lost: list[int]) -> None:
        """Memory does not suffice: end all workers; once they are replaced, let the scripts begin anew."""
        left = sorted(set(roles) - set(lost))
        if left:
            log.warning("%s\nThe script is started again from its own newest checkpoint.", reason)
            for role in left:
                self.nodes[self.plan["roles"][str(role)]].post({"type": "kill", "role": role})
            self.end_epoch("starting_over", reason, left)
            return
        self.initial, self.reached, self.catalogue, self._parts = None, 0, {}, 0
        self.groups.forget()
        self._started_over = self.epoch
        self.plan["start"] = [None, "initial"]
        self._start(roles, None, "initial", {}, {}, lost)

    def _standby_overdue(self) -> bool:
        return self.clock.now - self._ended_at > _STANDBY_GRACE

    def _wait(self, lost: list[int], reason: str = "") -> None:
        nodes = sorted({self.plan["roles"][str(role)] for role in lost} - set(self.nodes))
        what = f"no worker for roles {lost} (lost nodes: {', '.join(nodes) or 'none'})"
        what += f", and the job cannot shrink: {reason}" if reason else ""
        if self._leaving:
            self.end(1, f"{what}; the job was told to end (SIGTERM), so it does not wait for a node")
            return
        if self.settings.policy == "stop" and nodes:
            self.end(1, f"{what}; policy is stop")
            return
        self.phase = Phase.WAITING
        if nodes and what != self._waiting_for:
            self._waiting_for = what
            how = f"ftrun --join {self.settings.controller} --job-dir {self.job_dir}"
            what += f"; {self._what_is_left()}"
            self.event("waiting", f"{what}: {how}", lost)
            log.warning("%s; waiting for a node: %s", what, how)

    def _advice(self) -> str:
        if self._resumes:
            return "it goes on from the newest checkpoint of the script's own."
        return (
            "with checkpoints of its script's own that it resumes from (Megatron-LM's --save), or else with "
            "--ft-durable-interval, it will have something to fall back to."
        )

    def _what_is_left(self) -> str:
        """While the job waits for nodes."""
        if any(alive(self.nodes, int(role), node) for role, node in self.plan["roles"].items()):
            return "survivors hold their state until a node joins"
        left = "no node is left" if not self.nodes else "no node with a role is left"
        if self._resumes or self.settings.durable_dir:
            return f"{left}; once nodes join, the job goes on from what others hold, or its newest checkpoint"
        if self.initial is None or self.reached <= self.initial:
            return f"{left}; no step was done yet, and the job begins once nodes join"
        return f"{left}, and no checkpoint: what other nodes hold may suffice, else start the job again"

    def _start(
        self,
        roles: dict[int, str],
        version: int | None,
        origin: str,
        sources: Message,
        completed: Message,
        lost: list[int] | None = None,
    ) -> None:
        lead = self.nodes[roles[min(roles)]]
        durable = self.checkpoints.common(set(roles.values())) if origin == "durable" else None
        self.rejoin.epoch_begins()
        before = {int(role) for role in self.plan.get("roles", {})}
        away = {int(role) for role in self.plan.get("absent", {})}
        self.groups.withdrawn = set()
        self.groups.changed(version, roles)
        plan = {
            "type": "plan",
            "epoch": self.epoch,
            "id": f"{self.epoch}-{secrets.token_hex(4)}",
            "roles": {str(role): node for role, node in sorted(roles.items())},
            "nodes": where(self.nodes.values()),
            "store": lead.holdings["store"],
            "master": lead.holdings["master"],
            "version": version,
            "origin": origin,
            "durable": durable[version] if durable and version is not None else "",
            "job": self.plan.get("job") or secrets.token_hex(4),
            "sources": sources,
            "completed": completed,
            "parts": self._parts,
            "resumes": self._resumes,
            "started_over": self._started_over,
            "absent": {str(role): other for role, other in self.groups.absent(roles).items()},
            "adopted": {str(role): other for role, other in self.groups.adopted(roles).items()},
            "newcomers": sorted(lost or []),
            "groups": self.groups.to_json(),
            "catalogue": self.catalogue,
            "initial": self.initial,
            "reached": max(self.reached, version or 0),
            "futile": [self._futile, self._goal],
            "start": self.plan.get("start", [version, origin]),
        }
        self._begin(plan)
        self.phase = Phase.RUNNING
        moved = {role: node for role, node in roles.items() if role in (lost or [])}
        self.event(
            "decided", f"version {version} ({origin})", lost, version=version, origin=origin, moved=moved
        )
        for node in self.nodes.values():
            self._send_plan(node)
        if self.settings.policy == "shrink":
            self._open_ledger()
            for name, change in (("left", before - set(roles)), ("returned", away & set(roles))):
                if change:
                    self.event(name, f"replica groups {self.groups.of(change)}", sorted(change))

    def end(self, code: int, reason: str, shown: str = "") -> None:
        """End the job with this exit code, unless it is over. `shown`: on the console, if not `reason`."""
        if self._done is None or self._done.done():
            return
        self.phase = Phase.DONE
        self.event("finished" if code == 0 else "stopped", reason)
        if code:
            say(f"ftrun: the job stops: {shown or reason}")
        self._done.set_result(code)


def _recorded(path: Path) -> dict[str, int]:
    """Event -> the newest epoch that has it."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines() if path.is_file() else []
    except OSError as error:
        log.warning("%s: %s; some events may come twice", path, error)
        return found
    for line in lines:
        with contextlib.suppress(ValueError):  # torn by the death of its writer
            event = json.loads(line)
            found[event["event"]] = event["epoch"]
    return found


def main() -> int:
    """Entry of the controller process (started by `ftrun`)."""
    parser = argparse.ArgumentParser(prog="python -m ft_core.control.controller", description=__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--failed-before", type=int, help="given to a controller that takes another's place")
    parent.add_argument(parser)
    args = parser.parse_args()
    parent.expect(args.parent)
    log_to_console()
    collector.exempt()
    try:
        settings = Settings.read(args.job_dir)
        check_limit("the controller", *settings.size)
        return asyncio.run(Controller(settings, args.job_dir, args.failed_before).run())
    except ConfigError as error:
        say(f"ftrun: {error}")
        return 1
    except Exception:
        log.critical("this controller fails", exc_info=True)
        return FAILED
    finally:
        console().flush(_LAST_LINES)


if __name__ == "__main__":
    sys.exit(main())

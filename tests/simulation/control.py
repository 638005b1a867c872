"""The controller's process: its machine, and what a shell does around it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ft_core.control import events as ev
from ft_core.control.machine import Controller
from ft_core.protocol import messages as m

from .world import Call, Link, Process

if TYPE_CHECKING:
    from .job import SimJob
    from .node import SimNode

_RETRY = 0.5
TICK = 0.25
"""Seconds. The shell's is shorter; nothing may depend on it."""


class SimController(Process):
    """One process of those that are the controller, one after the other."""

    def __init__(self, job: SimJob, number: int) -> None:
        super().__init__(job.world, f"controller{number}")
        self.job = job
        ids = (f"{number}{at:x}" for at in itertools.count())
        self.machine = Controller(job.settings, "/job", lambda: next(ids), dict(job.recorded))
        self.connected: list[Link] = []
        """All that have ever been made to this process."""
        self.links: dict[int, Link] = {}
        self.nodes: dict[int, SimNode] = {}
        self._peers = itertools.count(1)
        self._arriving: set[int] = set()
        self._unwritten: list[Call] = []
        """Lines of files, as their disk is full."""
        self.code: int | None = None
        self.later(0.0, self._tick)

    def _tick(self) -> None:
        self.handle(ev.Tick())
        if self.code is None:
            self.later(TICK, self._tick)

    def accept(self, node: SimNode, link: Link) -> None:
        """A connection has come."""
        peer = next(self._peers)
        self.links[peer], self.nodes[peer] = link, node
        self._arriving.add(peer)
        link.heard[1] = lambda message: self.hear(peer, message)
        link.ended[1] = lambda: self._ended(peer)
        self.handle(ev.Arriving(len(self._arriving)))
        self.handle(ev.Admitted())

    def hear(self, peer: int, message: object) -> None:
        """The machine takes nothing of a connection that it has closed."""
        if peer not in self.links:
            return
        if isinstance(message, m.AgentHello):
            self._arriving.discard(peer)
            self.handle(ev.Greeted(peer, message))
            self.handle(ev.Arriving(len(self._arriving)))
        else:
            assert isinstance(message, m.Message)
            self._arriving.discard(peer)
            self.handle(ev.Received(peer, message))

    def _ended(self, peer: int) -> None:
        if self.links.pop(peer, None) is not None:
            self._arriving.discard(peer)
            self.handle(ev.Disconnected(peer))

    def handle(self, event: ev.Event) -> None:
        """One event, and its effects."""
        if not self.alive or self.code is not None:
            return
        if not isinstance(event, ev.Tick | ev.Received) or (
            isinstance(event, ev.Received) and not isinstance(event.message, m.Heartbeat)
        ):
            self.world.trace(f"{self.name} <- {short(event)}")
        for effect in self.machine.handle(event, self.awake):
            self._do(effect)
        self.job.check(self)

    def _do(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                if (link := self.links.get(peer)) is not None:
                    self.world.trace(f"{self.name} -> {self.nodes[peer].name}: {short(message)}")
                    self.job.sent(message)
                    link.send(1, message)
            case ev.Close(peer):
                if (link := self.links.get(peer)) is not None:
                    link.break_(0.0)
            case ev.Record():
                self.world.trace(
                    f"{self.name} records {effect.event}: {effect.reason} {list(effect.roles)} {effect.more}"
                )
                self.job.record(self, effect)
                self._write(lambda: self._recorded(effect.event, effect.epoch))
            case ev.Enter(line):
                self._write(lambda: self.job.ledger.append(line))
            case ev.Say(text):
                self.world.trace(f"{self.name} says {text}")
            case ev.End(code):
                self.world.trace(f"{self.name} ends the job with {code}")
                self.code = code
                for link in self.links.values():
                    link.send(1, m.Shutdown(code))
                self.job.ended(code)

    def _recorded(self, event: str, epoch: int) -> None:
        known = self.job.recorded
        known[event] = max(known.get(event, 0), epoch)

    def _write(self, line: Call) -> None:
        """As `FileOutlet`: what cannot be written waits, and is lost with this process."""
        self._unwritten.append(line)
        self._flush()

    def _flush(self) -> None:
        if not self.job.disk_full:
            for line in self._unwritten:
                line()
            self._unwritten.clear()
        elif len(self._unwritten) == 1:
            self.later(_RETRY, self._try_again)

    def _try_again(self) -> None:
        if self.job.disk_full:
            self.later(_RETRY, self._try_again)
        else:
            self._flush()

    def healed(self) -> None:
        """Goes on if it is stopped."""
        while self.alive and self.stopped:
            self.go_on()

    def die(self) -> None:
        """SIGKILL; `ftrun` starts another."""
        super().die()
        for link in self.connected:
            link.break_(self.world.rng.random())


def short(event: object) -> str:
    """For a trace."""
    text = repr(event)
    return text if len(text) < 400 else text[:400] + "..."

"""The controller's process: its machine, and what a shell does around it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ft_core.control import events as ev
from ft_core.control.machine import Controller
from ft_core.leadership import lease
from ft_core.protocol import messages as m

from . import time_account
from .time_account import Watched
from .world import Call, Link, Process

if TYPE_CHECKING:
    from .job import SimJob
    from .node import SimNode

_RETRY = 0.5
_COMPANY = 0.005
"""Seconds that messages wait for others where agents speak for others, at most."""
TICK = 0.25
"""Seconds. The shell's is shorter; nothing may depend on it."""


class SimController(Process):
    """One process of those that are the controller, one after the other; where the leader is elected, one on
    each node, of which one leads at a time."""

    def __init__(self, job: SimJob, number: int, machine_name: str = "") -> None:
        super().__init__(job.world, f"controller{number}")
        self.job, self.machine_name = job, machine_name
        names = (f"{number}{at:x}" for at in itertools.count())
        self._ids = lambda: next(names)
        self.connected: list[Link] = []
        """All that have ever been made to this process."""
        self.links: dict[int, Link] = {}
        self.nodes: dict[int, SimNode] = {}
        self._peers = itertools.count(1)
        self._arriving: set[int] = set()
        self._together: list[tuple[int, m.Message]] = []
        """Messages that come at once."""
        self._unwritten: list[Call] = []
        """Lines of files, as their disk is full."""
        self.code: int | None = None
        self.told_sick: dict[str, float] = {}
        """Machines that are, as nodes of theirs have said to this controller, and since when."""
        self.unanswered: dict[int, float] = {}
        """Connections of nodes that were asked whether they are well, and when."""
        self.wild = False
        """Whether its clock is worse than clocks may be."""
        self.acts_late = False
        """Whether it is stopped between its next decision and saying so."""
        self.began = job.world.now
        """When, as the process or as the leader that it is."""
        self.leads = job.arbiter is None
        self._floor, self._ending = 0, False
        self._lease = lease.Lease(1)
        self._time: Watched
        self._handled = 0.0
        """When the newest event was."""
        self.machine = Controller(job.settings, "/job", self._ids, {})
        if job.arbiter is None:
            self.machine = self._machine()
            self.later(0.0, self._tick)
        else:
            self.runs_at(1 + 0.05 * (2 * self.world.rng.random() - 1))
            self.later(self.world.rng.random(), self._campaign)

    @property
    def term(self) -> int:
        return self._lease.term

    def _machine(self, term: int = 1, **about: Any) -> Controller:
        """It goes on from what its predecessors have left."""
        job, self.began = self.job, self.world.now
        spent, at = job.spent
        self._time = job.time.controller(term, spent, at)
        past = {"term": term, "spent": spent, "ago": self.world.now - at, "wall": self.world.now}
        return Controller(job.settings, "/job", self._ids, dict(job.recorded), **about, **past)

    def _tick(self) -> None:
        self.handle(ev.Tick())
        if self.code is None and self.leads:
            self.later(4 * TICK if self.job.shape.brief else TICK, self._tick)

    # -- the lease -----------------------------------------------------------------------------

    def _campaign(self) -> None:
        """Look whether somebody leads, and lead if nobody does; as long as this process does not."""
        arbiter, asked = self.job.arbiter, self.clock
        assert arbiter is not None
        if self.leads or self.job.over:
            return

        def answered(term: int | None) -> None:
            found = lease.Lease(term or 1, lease.SECONDS, asked)
            if term and found.holds(self.clock):
                self._lead(found)
            else:
                self.later(lease.LOOK * (0.5 + self.world.rng.random()), self._campaign)

        arbiter.ask(self, self.machine_name, lambda: arbiter.acquire(self, self._floor), answered)

    def _lead(self, found: lease.Lease) -> None:
        self.leads, self._lease, self._ending = True, found, False
        settled = self.awake + lease.settled_after(lease.LOOK)
        if self.job.shape.brief:  # it decides as early as it may
            self.later(lease.settled_after(lease.LOOK), lambda: self.handle(ev.Tick()))
        self.machine = self._machine(term=found.term, settled=settled)
        self.world.trace(f"{self.name} on {self.machine_name} knows that it leads in term {found.term}")
        self._tick()
        self._renew(found)

    def _renew(self, held: lease.Lease) -> None:
        arbiter, asked = self.job.arbiter, self.clock
        assert arbiter is not None
        if not self.leads or self._lease is not held:
            return

        def answered(granted: bool | None) -> None:
            if self._lease is held and granted is False:
                self._resign("its lease is lost")
            elif granted:
                held.renewed(asked)

        arbiter.ask(self, self.machine_name, lambda: arbiter.renew(self, held.term), answered)
        self.later(lease.RENEW, lambda: self._renew(held))

    def _resign(self, why: str) -> None:
        """From now on it is a candidate again."""
        if self.leads:
            self.world.trace(f"{self.name} does not lead any more: {why}")
            self.leads = False
            self.hang_up()
            self._campaign()

    def _end(self, held: lease.Lease, effects: list[ev.Effect], code: int) -> None:
        """Say that the job is over, once whoever keeps the lease agrees."""
        arbiter, at = self.job.arbiter, self._handled
        assert arbiter is not None

        def agreed_to() -> bool:
            """From here on it is over, whoever is told, and by whom: candidates look."""
            agreed = arbiter.end(self, held.term, code)
            if agreed and not self.job.over:
                said = [effect for effect in effects if not isinstance(effect, ev.Send | ev.Close)]
                self._carry_out(said, at)
            return agreed

        def answered(agreed: bool | None) -> None:
            if agreed:
                sent = [effect for effect in effects if isinstance(effect, ev.Send | ev.Close)]
                self._carry_out(sent, at)
            elif self.leads and self._lease is held:
                self.later(0.1, lambda: self._end(held, effects, code))

        arbiter.ask(self, self.machine_name, agreed_to, answered)

    def hang_up(self) -> None:
        """All its connections end."""
        for link in self.connected:
            link.break_(self.world.rng.random())
        self.connected.clear()
        self.links.clear()
        self._arriving.clear()
        self._together.clear()

    # -- connections ---------------------------------------------------------------------------

    def accept(self, node: SimNode, link: Link) -> None:
        """A connection has come."""
        if not self.leads:  # any more, after it was stopped
            link.break_()
            return
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
            if not self.job.shape.relays:
                self.handle(ev.Received(peer, message))
                return
            self._together.append((peer, message))
            if len(self._together) == 1:
                self.later(self.world.rng.random() * _COMPANY, self._take_together)

    def _note_checks(self, event: ev.Event) -> None:
        """What is about to be heard of them."""
        said = [(event.peer, event.message)] if isinstance(event, ev.Received) else []
        for peer, message in event.messages if isinstance(event, ev.MessageBatch) else said:
            node = self.machine.cluster.peers.get(peer)
            if isinstance(message, m.NodeChecked):
                self.unanswered.pop(peer, None)
                if node is not None and any(c.soundness is m.Soundness.SICK for c in message.checks):
                    self.told_sick[node.name.partition("+")[0]] = self.world.now - message.age

    def _take_together(self) -> None:
        messages, self._together = [said for said in self._together if said[0] in self.links], []
        if messages:
            self.handle(ev.MessageBatch(messages))

    def _ended(self, peer: int) -> None:
        if peer in self.links:
            self._take_together()
            self.links.pop(peer, None)  # it may have hung up meanwhile
            self._arriving.discard(peer)
            self.handle(ev.Disconnected(peer))

    def handle(self, event: ev.Event) -> None:
        """One event, and its effects."""
        if not self.alive or self.code is not None or not self.leads or self._ending:
            return
        if not self._lease.holds(self.clock):
            self._resign("its lease may have run out")
            return
        if not isinstance(event, ev.Tick | ev.Received | ev.MessageBatch | ev.Pulsed) or (
            isinstance(event, ev.Received) and not isinstance(event.message, m.Heartbeat)
        ):
            self.world.trace(f"{self.name} <- ", event)
        if isinstance(event, ev.MessageBatch):
            for peer, message in event.messages:
                if not isinstance(message, m.Heartbeat):
                    self.world.trace(f"{self.name} <- ", ev.Received(peer, message))
        self._handled = self.world.now
        self._note_checks(event)
        effects = self.machine.handle(event, self.awake, self._handled)
        asked = (effect for effect in effects if isinstance(effect, ev.Send))
        self.unanswered |= {e.peer: self.world.now for e in asked if isinstance(e.message, m.CheckNode)}
        self._time.check(self.machine.view.account, self.world.now)
        self.job.decides(self, effects)
        if self.acts_late and decides(effects):
            self.acts_late = False
            self.job.stop_for_a_while(self, self.world.rng)
            held = self._lease
            at = self._handled
            self.do(lambda: self._act(effects, at) if self._lease is held else None)
        else:
            self._act(effects, self._handled)
        self.job.check(self)

    def _act(self, effects: list[ev.Effect], handled: float) -> None:
        """`handled`: when their event was."""
        if (ends := [e for e in effects if isinstance(e, ev.End)]) and self.job.arbiter is not None:
            self._ending = True
            self._end(self._lease, effects, ends[0].code)
        else:
            self._carry_out(effects, handled)

    def _carry_out(self, effects: list[ev.Effect], handled: float) -> None:
        """`handled`: when their event was."""
        self.job.time.stood_still(self.world.now - handled)
        for effect in effects:
            self._do(effect, handled)

    def _do(self, effect: ev.Effect, handled: float) -> None:
        match effect:
            case ev.Send(peer, message):
                if (link := self.links.get(peer)) is not None:
                    self.world.trace(f"{self.name} -> {self.nodes[peer].name}: ", message)
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
                line = time_account.line(effect, self.term, self.world.now)
                self.job.time.said += 1
                self._write(lambda: self.job.time.write(line))
                number = self.job.time.said  # notes reach where they are kept in order, or not at all
                self._note(lambda: self._recorded(effect, handled, number))
            case ev.AppendLedger(line):
                part = self.job.ledger.setdefault(self.term, [])  # on its own machine
                self._write(lambda: part.append(line))
            case ev.PrintConsole(text):
                self.world.trace(f"{self.name} says {text}")
            case ev.End(code):
                self.world.trace(f"{self.name} ends the job with {code}")
                self.code = code
                for link in self.links.values():
                    link.send(1, m.Shutdown(code))
                self.job.ended(self, code)
            case ev.Refuse(reason):
                self.world.trace(f"{self.name} turns somebody away: {reason}")
            case ev.Resign(term):
                self._floor = term
                self._resign(f"there is term {term}")

    def _note(self, write: Call) -> None:
        """What a successor must know: in the controller's files, or with the lease."""
        arbiter, term = self.job.arbiter, self.term
        if arbiter is None:
            self._write(write)
        else:
            arbiter.ask(self, self.machine_name, lambda: arbiter.note(self, term, write), lambda _: None)

    def _recorded(self, record: ev.Record, at: float, number: int) -> None:
        known = self.job.recorded
        known[record.event] = max(known.get(record.event, 0), record.epoch)
        if (spent := record.more.get("spent")) is not None and number > self.job.noted:
            self.job.spent, self.job.noted = (spent, at), number

    def _write(self, line: Call) -> None:
        """As `FileWriter`: what cannot be written waits, and is lost with this process."""
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
        self.acts_late = False
        if self.wild:
            self.shows(self.world.now)
            self.world.at(lease.SECONDS, self._is_tame)  # that clock says when it had its lease
        while self.alive and self.stopped:
            self.go_on()

    def _is_tame(self) -> None:
        self.wild = False

    def die(self) -> None:
        """SIGKILL; `ftrun` starts another."""
        super().die()
        self.hang_up()


def decides(effects: list[ev.Effect]) -> bool:
    """Whether the job's epoch ends or begins with these, or the job does."""
    said = [e.message for e in effects if isinstance(e, ev.Send)]
    return any(isinstance(message, m.Abort | m.OwnPlan | m.SharedPlan | m.Shutdown) for message in said)

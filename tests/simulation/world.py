"""Virtual time, processes that stop and die, and connections that delay, break and are cut."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]


class World:
    """The clock, the order in which things happen, and a trace of them."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self.lines: list[str] | None = [] if trace else None
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Call]] = []

    def at(self, delay: float, call: Call) -> None:
        """Do it later."""
        heapq.heappush(self._queue, (self.now + delay, next(self._order), call))

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Until then, or until it is `over`."""
        queue = self._queue
        while queue and queue[0][0] <= until and not over():
            self.now, _, call = heapq.heappop(queue)
            self.events += 1
            call()
        if not over():
            self.now = max(self.now, until)

    def trace(self, text: str, about: object = None) -> None:
        """For whoever repeats a schedule. `about`: an event, of which not more than a line is shown."""
        if self.lines is not None:
            shown = "" if about is None else repr(about)
            self.lines.append(f"{self.now:8.3f} {text}{shown[:400]}{'...' if len(shown) > 400 else ''}")

    def delay(self, rng: random.Random | None = None) -> float:
        """Of a message: short as a rule, and now and then not."""
        draw = (rng or self.rng).random()
        return draw * 0.01 if draw < 0.95 else draw * 0.6


class Process:
    """Something that can be stopped, go on, and die. What happens to it while it is stopped happens after."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.stopped = True, 0
        self.rate = 1.0
        """Of its machine's clock, against true time."""
        self._clock = 0.0, world.now
        self._backlog: deque[Call] = deque()
        self._slept, self._stopped_at = 0.0, 0.0

    @property
    def awake(self) -> float:
        """Its own time: that in which it was not stopped."""
        since = self._stopped_at if self.stopped else self.world.now
        return since - self._slept

    @property
    def slept(self) -> float:
        """Seconds for which it was stopped, before it went on."""
        return self._slept

    @property
    def clock(self) -> float:
        """Of its machine: goes on while the process is stopped."""
        shown, since = self._clock
        return shown + self.rate * (self.world.now - since)

    def runs_at(self, rate: float) -> None:
        """Its machine's clock does, from now on."""
        self._clock = self.clock, self.world.now
        self.rate = rate

    def shows(self, clock: float) -> None:
        """Somebody has set its machine's clock right, which goes well from now on."""
        self._clock, self.rate = (clock, self.world.now), 1.0

    def do(self, call: Call) -> None:
        """Something happens to this process."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append(call)
        else:
            call()

    def later(self, delay: float, call: Call) -> None:
        """This process does something after a while."""
        self.world.at(delay, lambda: self.do(call))

    def stop(self) -> None:
        """SIGSTOP, or a machine that stalls. May be done twice, and is undone as often."""
        if not self.stopped:
            self._stopped_at = self.world.now
        self.stopped += 1

    def go_on(self) -> None:
        """SIGCONT."""
        if not self.alive or not self.stopped:
            return
        self.stopped -= 1
        if self.stopped:
            return
        self._slept += self.world.now - self._stopped_at
        while self._backlog and not self.stopped and self.alive:
            self._backlog.popleft()()

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        self._backlog.clear()


class Network:
    """What gets through between machines; that of a controller which is on none of the nodes has no name."""

    def __init__(self) -> None:
        self.sound = True
        """Whether everything has always got through."""
        self.cut: set[str] = set()
        """Machines that nothing gets to or from."""
        self.severed: set[tuple[str, str]] = set()
        """From one machine to another."""
        self.mended: dict[tuple[str, str], float] = {}
        """When such a way was last open again."""

    def passes(self, sender: str, receiver: str) -> bool:
        """Whether a message would."""
        if sender == receiver:
            return True
        found = not self.cut & {sender, receiver} and (sender, receiver) not in self.severed
        self.sound &= found
        return found

    def joins(self, one: str, other: str) -> bool:
        """Whether the two can have a connection."""
        return self.passes(one, other) and self.passes(other, one)

    def joined(self, one: str, other: str, since: float) -> bool:
        """Whether they can, and could since then."""
        ways = (one, other), (other, one)
        return self.joins(one, other) and all(self.mended.get(way, since) <= since for way in ways)

    def heal(self, now: float) -> None:
        """All of it."""
        self.mended |= dict.fromkeys(self.severed, now)
        self.cut.clear()
        self.severed.clear()


class Link:
    """A connection between two processes: in order each way, until it breaks.

    `heard(message)` and `ended()` of either end are called for that process.
    """

    def __init__(
        self, world: World, ends: tuple[Process, Process], machines: tuple[str, str], network: Network
    ) -> None:
        self.world, self.ends, self.open = world, ends, True
        self._machines, self._network = machines, network
        self._queues: tuple[deque[object], deque[object]] = deque(), deque()
        self._ready = [0.0, 0.0]
        self.heard: list[Callable[[object], None]] = [lambda _: None, lambda _: None]
        self.ended: list[Call] = [lambda: None, lambda: None]

    def send(self, sender: int, message: object) -> None:
        """From one end to the other."""
        if not self.open:
            return
        self._queues[sender].append(message)
        self._ready[sender] = max(self._ready[sender], self.world.now + self.world.delay())
        self.world.at(self._ready[sender] - self.world.now, lambda: self._arrive(sender))

    def passes(self, sender: int) -> bool:
        """Whether anything gets through from that end at present."""
        return self._network.passes(self._machines[sender], self._machines[1 - sender])

    def _arrive(self, sender: int) -> None:
        queue = self._queues[sender]
        if not queue:
            return
        if not self.passes(sender):
            self.world.at(0.5, lambda: self._arrive(sender))
            return
        message = queue.popleft()
        self.ends[1 - sender].do(lambda: self.heard[1 - sender](message))

    def break_(self, lost: float = 1.0, late: float = 0.0) -> None:
        """Both ends hear of it, the second so many seconds late; what is on its way arrives before or, with
        this likelihood, is lost."""
        if not self.open:
            return
        self.open = False
        for end, after in enumerate((0.0, late)):
            if self.world.rng.random() < lost:
                self._queues[1 - end].clear()
            if after:
                self.world.at(after, lambda end=end: self._end(end))  # type: ignore[misc]
            else:
                self._end(end)

    def _end(self, end: int) -> None:
        """Tell one end, after all that was sent to it."""
        if self._queues[1 - end] or not self.passes(1 - end):
            self.world.at(0.1, lambda: self._end(end))
        else:
            self.ends[end].later(self.world.delay(), self.ended[end])

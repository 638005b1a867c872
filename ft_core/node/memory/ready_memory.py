"""Memory for the snapshots of roles that may come to this node, there before it is needed.

What a role's state is fetched into, and snapshots go to, is memory files. The kernel gives them page by page
as they are first written to, four KiB each: a gigabyte of them takes half a second to three, as long as a
fetch of ten. So a node with free places, a spare above all, has two buffers for each place in its memory
before anybody dies. That is what it will need if it is ever of use; without roles it needs nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ft_core.errors import FtError
from ft_core.net.transport import TcpTransport
from ft_core.process.host_memory import HostMemory, room
from ft_core.protocol.messages import NodePlan
from ft_core.protocol.transfers import DescribeBuffers, LargestBuffer
from ft_core.state.memory import SharedMemory, snapshot_memory, touch
from ft_core.state.store import NodeStore

log = logging.getLogger(__name__)

_PIECE = 4 << 20
"""Bytes that are touched at a time: for so long whoever takes the memory, or maps other, may have to wait."""
_LOOK = 64 << 20
"""Bytes after which the room that is left is looked at again."""
_KEEP_FREE = 1 / 4
"""The part of all memory that stays free: nothing is made ready that would leave less."""
_GIVE_BACK = 1 / 8
"""The part of all memory: with less free, what is ready goes to those who need it now."""
_PAUSE = 1.0
"""Seconds between two looks at the room, and for how large buffers are."""
_SETTLES = 5.0
"""Seconds of a new epoch before it is begun with: until its roles train, others need the bandwidth more."""
_ASK_AGAIN, _SELDOM = 4, 64
"""Pauses after which nodes are asked again: state grows, with the optimizer's first step at the latest. While
it does not, they are asked half as often each time, until it is the second number."""
_ASKED = 8
"""Nodes at most: of evenly many roles, with the first and the last, as the stages of a pipeline differ."""
_DEADLINE = 5.0


class _Buffer:
    """One that is ready, or becomes it."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.touched = 0
        self.lock = threading.Lock()
        """Held while a piece is touched."""
        self.taken = False

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def touch(self) -> bool:
        """Have the kernel give one more piece. False: all is there, or it is somebody's."""
        with self.lock:
            if self.taken or self.touched >= self.nbytes:
                return False
            size = min(_PIECE, self.nbytes - self.touched)
            touch(self.memory, self.touched, size)
            self.touched += size
            return True

    def take(self, nbytes: int) -> SharedMemory:
        """Give the buffer to the caller, as large as is said. Waits for one piece at most."""
        self.taken = True
        with self.lock:
            return self.memory if nbytes <= self.nbytes else self.memory.grown(nbytes)


class ReadyMemory:
    """The memory that one agent has made ready."""

    def __init__(
        self, store: NodeStore, transport: TcpTransport, places: int, room: Callable[[], HostMemory] = room
    ) -> None:
        """`places`: roles that this node may play."""
        self._store, self._transport, self._places, self._room = store, transport, places, room
        store.create = self.take
        self._plan: NodePlan | None = None
        self._node = ""
        self._lock = threading.Lock()
        """A lock for `_buffers` alone."""
        self._buffers: list[_Buffer] = []
        self._size = 0
        self._ask_in = self._pauses = 0
        """Rounds until nodes are asked again, and how many they were the last time."""
        self._asked: NodePlan | None = None
        """The plan that the next two are of."""
        self._nodes: list[str] = []
        """Nodes that have roles, some of which are asked."""
        self._wanted = 0
        """Buffers for places without a role."""
        self._short = False
        """Whether there was too little room the last time."""
        self._over = False

    @property
    def nbytes(self) -> int:
        """Bytes that are ready and nobody's."""
        with self._lock:
            return sum(buffer.touched for buffer in self._buffers)

    def use(self, node: str, plan: NodePlan) -> None:
        """What this node, of that name, plays is another now."""
        self._node, self._plan = node, plan

    def take(self, nbytes: int) -> SharedMemory:
        """Memory to share with a worker: what is ready, if there is some. Raises OSError."""
        with self._lock:
            # Much larger ones are for another role than this.
            fit = [b for b in self._buffers if b.nbytes < 2 * nbytes]
            large = [b for b in fit if b.nbytes >= nbytes]
            chosen = max(large or fit, key=lambda b: (b.touched, -b.nbytes), default=None)
            if chosen is not None:
                self._buffers.remove(chosen)
        return chosen.take(nbytes) if chosen is not None else snapshot_memory(nbytes)

    async def serve(self) -> None:
        """Make memory ready until cancelled. All that takes time is done in a thread."""
        try:
            seen: NodePlan | None = None
            while True:
                if (plan := self._plan) is not None and plan is seen:
                    await asyncio.to_thread(self.look, plan)
                pause = _PAUSE if plan is seen else _SETTLES
                seen = plan
                await asyncio.sleep(pause)
        finally:
            self._over = True

    def look(self, plan: NodePlan) -> None:
        """Make ready what is missing, and give back what is too much."""
        if plan is not self._asked:
            self._asked, self._ask_in, self._pauses = plan, 0, _ASK_AGAIN // 2
            roles = Counter(plan.roles.values())
            self._nodes = _spread(list(roles))
            self._wanted = 2 * max(0, self._places - roles[self._node])
        if self._wanted and self._ask_in <= 0:
            size = self._largest(plan) or self._size
            self._pauses = min(2 * self._pauses, _SELDOM) if size == self._size else _ASK_AGAIN
            self._size, self._ask_in = size, self._pauses if size else 0
        self._ask_in -= 1
        self._give_back(2 * self._places - self._store.buffers())
        if not self._size:
            return
        with self._lock:
            have = len(self._buffers)
        with contextlib.suppress(OSError):  # of the limits of this process
            self._grow()
            for _ in range(have, self._wanted):
                buffer = _Buffer(snapshot_memory(self._size))
                with self._lock:
                    self._buffers.append(buffer)
        with self._lock:
            todo = [buffer for buffer in self._buffers if buffer.touched < buffer.nbytes]
        for buffer in todo:
            self._touch(buffer, plan)

    def _grow(self) -> None:
        """Make those larger that are too small by now."""
        with self._lock:
            small = [buffer for buffer in self._buffers if buffer.nbytes < self._size]
            self._buffers = [buffer for buffer in self._buffers if buffer not in small]
        for buffer in small:
            larger = _Buffer(buffer.take(self._size))  # its mapping has nothing yet, but that takes little
            with self._lock:
                self._buffers.append(larger)

    def _touch(self, buffer: _Buffer, plan: NodePlan) -> None:
        looked = -_LOOK
        while not self._over and self._plan is plan:
            if buffer.touched >= looked + _LOOK:
                looked = buffer.touched
                left = self._room()
                if left.free - (buffer.nbytes - buffer.touched) < _KEEP_FREE * left.total:
                    if not self._short:
                        log.info(
                            "node %s: %.1f GB of memory for roles that may come are not made ready: "
                            "%.1f of %.1f GB are free",
                            *(self._node, buffer.nbytes / 1e9, left.free / 1e9, left.total / 1e9),
                        )
                    self._short = True
                    return
                self._short = False
            try:
                if not buffer.touch():
                    return
            except OSError as error:
                log.info("node %s: memory for roles that may come is not made ready: %s", self._node, error)
                return

    def _give_back(self, keep: int) -> None:
        left = self._room() if self._buffers else None
        if left is not None and left.free < _GIVE_BACK * left.total:
            keep = 0
        with self._lock:
            ready = sorted(self._buffers, key=lambda buffer: -buffer.touched)
            self._buffers = [b for b in ready if b.nbytes < 2 * self._size][: max(keep, 0)]
            # What is left out goes at the end of this call, in this thread: the kernel takes its time.

    def _largest(self, plan: NodePlan) -> int:
        """Bytes of the largest buffer of those who can be asked; 0 before there is one."""
        found = 0
        for name in self._nodes:
            if self._over or self._plan is not plan:
                break
            with contextlib.suppress(KeyError, FtError):  # it is gone: there will be another plan
                answer = self._transport.request(plan.nodes[name].data, DescribeBuffers(), _DEADLINE)
                if isinstance(answer, LargestBuffer):
                    found = max(found, answer.nbytes)
        return found


def _spread(nodes: Sequence[str]) -> list[str]:
    """Some of them, first and last included."""
    if len(nodes) <= _ASKED:
        return list(nodes)
    return [nodes[index * (len(nodes) - 1) // (_ASKED - 1)] for index in range(_ASKED)]

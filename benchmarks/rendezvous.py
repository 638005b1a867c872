"""What the store of an epoch is asked for in a recovery, and how long it takes to answer.

    python -m benchmarks.rendezvous --members 1000 10000
    python -m benchmarks.rendezvous --members 10000 --layout data --json

First real groups of gloo, of 2 to 8 processes: which requests and bytes each member has with the store, and
how many connections with the others. Then the store alone, in a process of its own as its agent has it, and
simulated members that open the groups of a Megatron job (all roles, data, tensor, pipeline and model
parallel) after one node was replaced: requests by kind, seconds until the last member has all its groups, the
longest wait for one answer, and the store's CPU seconds and memory.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import time
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.common import cpu_seconds, finish, parser, table
from benchmarks.rendezvous_members import Seen, groups_of, serve
from benchmarks.simulated import LAYOUTS, PER_NODE, Layout
from ft_core.comm import rendezvous_server
from ft_core.process.descriptors import raise_limit
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.groups import GroupId
from ft_core.protocol.store import Request

PATIENCE = 600.0
SECRET = b"of this benchmark"
_context = multiprocessing.get_context("spawn")


class _Counting(rendezvous_server._Store):
    """Counts what it is asked."""

    requests: ClassVar[Counter[str]] = Counter()

    def handle(self, channel: AsyncChannel[Request], request: Request) -> None:
        self.requests[type(request).__name__] += 1
        super().handle(channel, request)


def _store(orders: Connection) -> None:
    """A process that has the stores, as an agent does. Each word is answered with the requests so far, and
    the most CPU seconds that they have taken before anybody else had a turn."""
    raise_limit()
    rendezvous_server._Store = _Counting  # type: ignore[misc]
    stores = rendezvous_server.Stores("127.0.0.1", SECRET)
    held = [0.0]

    async def run() -> None:
        def fail(error: Exception) -> None:
            raise error

        serving = asyncio.ensure_future(stores.serve(fail))
        asyncio.get_running_loop().add_reader(orders.fileno(), answer)
        while not serving.done():  # what else the agent's loop has to do comes no sooner
            begun = time.thread_time()
            await asyncio.sleep(0)
            held[0] = max(held[0], time.thread_time() - begun)
            await asyncio.sleep(0.01)
        await serving

    def answer() -> None:
        try:
            orders.recv()
        except EOFError:
            os._exit(0)
        orders.send((dict(_Counting.requests), held[0]))

    orders.send(stores.address)
    asyncio.run(run())


class Store:
    """That process."""

    def __init__(self) -> None:
        self._orders, other = _context.Pipe()
        self._process = _context.Process(target=_store, args=(other,), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0
        self.address: str = self._orders.recv()

    def requests(self) -> tuple[dict[str, int], float]:
        """So far, by kind; and the most CPU seconds for which the event loop was held up."""
        self._orders.send(None)
        found: tuple[dict[str, int], float] = self._orders.recv()
        return found

    def memory_mb(self) -> float:
        """That it has taken at most."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


# -- real groups ---------------------------------------------------------------------------------------


def _sockets() -> int:
    """Connections of this process, and the ports that it listens at."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:  # that of the listing itself
            continue
    return found


def _gloo(address: str, epoch: int, rank: int, size: int, orders: Connection) -> None:
    """A real member of a real group."""
    import torch

    from ft_core.comm.inner import Inner, Opener

    opener = Opener(epoch, address, SECRET, rank, lambda: True, lambda group: None)
    opener._store()
    before = _sockets()
    group, members = GroupId.of(range(size), 0), tuple(range(size))
    inner = Inner(group, members, rank, {"cpu": "gloo"}, timedelta(seconds=60), None, epoch, None)
    opener.open(inner, urgent=False, met=lambda: None)
    inner.pg.allreduce([torch.ones(4)]).wait()
    orders.send(_sockets() - before)
    orders.recv()
    os._exit(0)


def real(size: int) -> dict[str, Any]:
    """A group of gloo: what all of its members ask together, and the most sockets of one."""
    store = Store()
    members = []
    for rank in range(size):
        own, other = _context.Pipe()
        process = _context.Process(target=_gloo, args=(store.address, 1, rank, size, other), daemon=True)
        process.start()
        members.append((own, process))
    try:
        sockets = [own.recv() for own, _ in members]
        requests, _ = store.requests()
        return {"size": size, "requests": requests, "sockets_per_member": max(sockets)}
    finally:
        for own, process in members:
            own.send(None)
            process.join()
        store.close()


# -- many members --------------------------------------------------------------------------------------


def simulated(members: int, layout: str, processes: int) -> dict[str, Any]:
    """One size."""
    shape = Layout.of(layout, members)
    newcomers = frozenset(range(PER_NODE, 2 * PER_NODE))
    store = Store()
    fleets: list[Connection] = []
    started = []
    for number in range(processes):
        own, other = _context.Pipe()
        roles = range(number, shape.roles, processes)
        arguments = (shape, newcomers, store.address, SECRET, 1, roles, other)
        process = _context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        fleets.append(own)
        started.append(process)
    try:
        for own in fleets:
            own.recv()
        cpu, begun = cpu_seconds(store.pid), time.monotonic()
        for own in fleets:
            own.send("begin")
        connected = 0.0
        while True:
            time.sleep(0.2)
            found: list[Seen] = []
            for own in fleets:
                own.send("seen")
                found.append(own.recv())
            if lost := [each for seen in found for each in seen.lost]:
                raise ConnectionError(f"{len(lost)} members lost the store: {lost[:3]}")
            if not connected and sum(seen.connected for seen in found) == shape.roles:
                connected = time.monotonic() - begun
            if sum(seen.through for seen in found) == shape.roles:
                break
            if time.monotonic() - begun > PATIENCE:
                raise TimeoutError(f"not through after {PATIENCE:.0f} s: {found}")
        seconds = max(seen.last for seen in found) - begun
        cpu = cpu_seconds(store.pid) - cpu
        requests, held = store.requests()
        total = sum(requests.values())
        return {
            "members": shape.roles,
            "layout": layout,
            "groups_per_member": len(groups_of(shape, 0)),
            "requests": requests,
            "requests_per_member": total / shape.roles,
            "connected_s": connected,
            "seconds": seconds,
            "store_cpu_s": cpu,
            "requests_per_cpu_s": total / cpu if cpu else math.inf,
            "loop_held_cpu_s": held,
            "longest_wait_s": max(seen.longest for seen in found),
            "bytes_to_a_member": sum(seen.received for seen in found) / shape.roles,
            "largest_message": max(seen.largest for seen in found),
            "memory_mb": store.memory_mb(),
        }
    finally:
        for own in fleets:
            own.send("end")
        for process in started:
            process.join(10)
            process.kill()
        store.close()


def text(groups: list[dict[str, Any]], sizes: list[dict[str, Any]]) -> str:
    """Two tables."""
    kinds = sorted({kind for row in groups for kind in row["requests"]})
    lines = [[kind, *(row["requests"].get(kind, 0) for row in groups)] for kind in kinds] + [
        ["sockets of a member", *(row["sockets_per_member"] for row in groups)]
    ]
    found = [table(["gloo, requests of all", *(f"{row['size']} members" for row in groups)], lines)] * bool(
        groups
    )
    names = [name for name in sizes[0] if name not in ("members", "layout", "requests")]
    rows = [[name, *(f"{row[name]:,.2f}" for row in sizes)] for name in names]
    kinds = sorted({kind for row in sizes for kind in row["requests"]})
    rows += [[kind, *(f"{row['requests'].get(kind, 0):,}" for row in sizes)] for kind in kinds]
    layout = sizes[0]["layout"]
    found.append(table([f"layout {layout}", *(f"{row['members']:,} members" for row in sizes)], rows))
    return "\n\n".join(found)


def main() -> None:
    """Measure, print."""
    p = parser(__doc__)
    p.add_argument("--members", type=int, nargs="+", default=[1000, 10_000])
    p.add_argument("--layout", choices=LAYOUTS, default="model")
    p.add_argument("--real", type=int, nargs="*", default=[2, 4, 8], help="sizes of real groups")
    p.add_argument("--processes", type=int, default=2, help="that simulate members")
    args = p.parse_args()
    limit = raise_limit()
    if max(args.members) * 1.1 + 512 > limit:
        p.error(f"a process may have {limit} files open here, and the store needs one for each member")
    groups = [real(size) for size in args.real]
    sizes = [simulated(members, args.layout, args.processes) for members in args.members]
    finish("rendezvous", args, {"groups": groups, "sizes": sizes}, text(groups, sizes))


if __name__ == "__main__":
    main()

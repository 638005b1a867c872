"""What the host does for one collective: the engine's groups beside torch's own, over a backend that does
nothing.

CPU time of the thread that issues and waits, in paired blocks with a control, and what that makes of a step
of 175B parameters on 1,024 GPUs: some 11,500 collectives in 8 s (3.1 M tokens at 400 TFLOP/s a GPU), while
which the host runs ahead of the device. `asynchronous`: as over NCCL, where the engine watches each operation
to its end, but for what CUDA takes to record an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import finish, parser, spread, table
from ft_core.comm.inner import Inner
from ft_core.comm.process_group import Communicators
from ft_core.state.memory import ControlBlock

COLLECTIVES, STEP = 11_500, 8.0
"""Of a rank in a step, and its seconds."""
UNDER_WAY = 0.002
"""Seconds until the device has done an operation."""


class _Nothing(Inner):
    """An open communicator of a backend that does nothing."""

    def by_gloo(self, args: Any) -> bool:
        return not self.asynchronous

    def marker(self) -> Callable[[], bool]:
        end = time.monotonic() + UNDER_WAY
        return lambda: time.monotonic() > end


def _group(asynchronous: bool) -> Any:
    control = ControlBlock.create()
    comms = Communicators(0, 2, lambda reason: None, b"unused", flight=control.flight)
    comms.startup.recording, comms.epoch = False, 1
    comms.flight.begins(1)
    group = comms.create((0, 1), "gloo", timedelta(seconds=600), dist.HashStore(), None)
    inner = _Nothing(group.identity, (0, 1), 0, group.devices, group.timeout, None, 1, None)
    inner.pg, inner.ready, inner.asynchronous = dist.group.WORLD, True, asynchronous
    group.inner = inner
    return group


def _all_reduce(group: Any) -> Callable[[], None]:
    tensors, options = [torch.ones(16)], dist.AllreduceOptions()
    return lambda: group.allreduce(tensors, options).wait()


def _send(group: Any) -> Callable[[], None]:
    tensors = [torch.ones(16)]
    return lambda: group.send(tensors, 1, 0).wait()


def _microseconds(call: Callable[[], None], times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times * 1e6


def main() -> None:
    """Measure, print."""
    p = parser(__doc__)
    p.add_argument("--times", type=int, default=2000, help="operations in a block")
    p.add_argument("--blocks", type=int, default=15)
    args = p.parse_args()
    if args.quick:
        args.times, args.blocks = 200, 3
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    results, rows = [], []
    for name, operation in (("all_reduce of 64 B", _all_reduce), ("send of 64 B", _send)):
        bare = operation(dist.group.WORLD)
        for kind, group in (("as over gloo", _group(False)), ("asynchronous", _group(True))):
            ours = operation(group)
            blocks = [[_microseconds(f, args.times) for f in (bare, ours, bare)] for _ in range(args.blocks)]
            before, engine, control = (spread(column) for column in zip(*blocks, strict=True))
            more = spread([each[1] - each[0] for each in blocks])
            results.append(
                {"operation": name, "as": kind, "bare": before, "engine": engine, "control": control}
                | {"more": more}
            )
            share = more["median"] * COLLECTIVES / STEP / 1e6
            figures = [f"{each['median']:.1f}" for each in (before, control, engine, more)]
            rows.append(
                [f"{name}, {kind}", *figures, f"{more['p25']:.1f} .. {more['p75']:.1f}", f"{share:.2%}"]
            )
    header = ["microseconds of the host", "bare", "control", "engine", "more", "quartiles", "of a step"]
    finish("host_cost", args, {"operations": results}, table(header, rows))


if __name__ == "__main__":
    main()

"""The training script of `benchmarks.overhead`: the recipe's trainer, with protection switched on and off, or
with the flight recorder alone.

Blocks of steps alternate within one process: a protected block (X) is framed by plain ones (O), and so is
a plain block that is only called protected (A), the control. In plain blocks the optimizer has its own
methods back and nothing is staged. The first step of each block is not counted: it still carries the work
of the block before it, or does not carry its own yet. Under plain torchrun every block is plain. With the
recorder alone (`Recorder`) all blocks are protected, and those that are called plain leave no flight record.
"""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401  (before megatron, which keeps references to torch.cuda)

# isort: on
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import cpu_seconds
from benchmarks.overhead import WARM_UP
from ft_core.cli.ask import status
from ft_core.comm.flight import FlightRecorder
from ft_core.comm.process_group import Communicators
from ft_core.state.memory import Word
from ft_core.state.snapshot import Snapshotter
from ft_core.worker import session
from recipes.megatron.pretrain_gpt_core import Trainer, initialize, parse_args

_METHODS = ("step", "step_with_ready_grads")


class Meter:
    """Counts what protection does in this worker, by wrapping the session's and the snapshotter's methods."""

    def __init__(self, live: session.Session) -> None:
        self.live = live
        self.foreground = self.copy_wall = self.copy_cpu = 0.0
        self.copies = 0
        self.agent = os.getpgrp()  # an agent leads its node's process group
        self._wrap(live, "step_done", self._step_done)
        self._wrap(Snapshotter, "_copy", self._copied)

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., None]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: around(original, *args))

    def _step_done(self, original: Callable[..., None], *args: Any) -> None:
        began = time.perf_counter()
        original(*args)
        self.foreground += time.perf_counter() - began

    def _copied(self, original: Callable[..., None], *args: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        original(*args)
        self.copy_wall += time.perf_counter() - wall
        self.copy_cpu += time.thread_time() - cpu
        self.copies += 1

    def read(self) -> dict[str, float]:
        """All counters as they stand."""
        return {
            "operations": sum(self.live._shell.comms.counts.values()),
            "waited": self.live._shell.control[Word.WAITED_NS] / 1e9,
            "foreground": self.foreground,
            "copy_wall": self.copy_wall,
            "copy_cpu": self.copy_cpu,
            "copies": self.copies,
            "agent_cpu": cpu_seconds(self.agent),
        }


class Protection:
    """Takes the hooks of `ft_megatron.training.ProtectedTraining` off the optimizer, and puts them back."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._hooks = {name: optimizer.__dict__[name] for name in _METHODS}

    @contextmanager
    def off(self) -> Any:
        """Within, the optimizer is Megatron's own."""
        for name in _METHODS:
            del self._optimizer.__dict__[name]
        yield
        self._optimizer.__dict__.update(self._hooks)


class Silent(FlightRecorder):
    """Records nothing."""

    def begin(self, *_: Any) -> int:
        return 0

    def end(self, *_: Any) -> None:
        pass


class Recorder:
    """Takes the flight recorder off the process groups, and puts it back."""

    def __init__(self, comms: Communicators) -> None:
        self._comms, self._silent = comms, Silent(comms.role)

    @contextmanager
    def off(self) -> Any:
        """Within, nothing is recorded."""
        recorder, self._comms.flight = self._comms.flight, self._silent
        yield
        self._comms.flight = recorder


def blocks(trainer: Trainer, pattern: str, block: int, recorder: bool) -> list[dict[str, Any]]:
    """Train blocks of 1 + `block` steps; returns what each took, the first step left out. What is on and off
    is the recorder alone, or protection."""
    live = session.current()
    meter: Meter | None = None
    switch: Protection | Recorder | None = None
    if live is not None:
        meter = Meter(live)
        switch = Recorder(live._shell.comms) if recorder else Protection(trainer.optimizer)
    steps = 0

    def run(protected: bool) -> None:
        nonlocal steps
        trainer.train_step(steps)
        if protected:
            trainer.training.step_done(None)
        steps += 1

    def counted(kind: str) -> dict[str, Any]:
        if live is not None:
            # Or the pause would count as a step, and widen the gate.
            live._protected.step_began = time.monotonic_ns()
        protected = kind == "X" or (recorder and live is not None)
        run(protected)
        before = meter.read() if meter else {}
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(block):
            run(protected)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        after = meter.read() if meter else {}
        return {"kind": kind, "seconds": seconds, "cpu": cpu} | {k: after[k] - before[k] for k in after}

    for _ in range(WARM_UP):
        run(live is not None)
    found = []
    for kind in pattern:
        if switch is not None and kind != "X":
            with switch.off():
                found.append(counted(kind))
        else:
            found.append(counted(kind))
    return found


def sent(role: int) -> tuple[int, int]:
    """Bytes that this role's agent has sent to others, and for how many snapshots."""
    live = session.current()
    if live is None:
        return 0, 0
    time.sleep(1.5)  # the figure comes with a heartbeat
    row = next(row for row in status(live.job_dir).roles if row.role == role)
    return row.h2h_bytes or 0, row.h2h_snapshots or 0


def state_bytes() -> int:
    """Bytes of this role's snapshot."""
    live = session.current()
    if live is None:
        return 0
    _, own = live._protected.snapshots._of[live.role]
    buffer = own._buffers[0]
    return sum(s.nbytes for s in buffer.segments) if buffer else 0


def main() -> None:
    """Train as the recipe's flags say; FT_BENCH: pattern of blocks, steps of a block, where to report,
    `recorder` of `blocks`."""
    pattern, block, out, recorder = json.loads(os.environ["FT_BENCH"])
    args = parse_args(sys.argv[1:])
    initialize(args)
    trainer = Trainer(args)
    entered: list[int] = []

    def train() -> list[dict[str, Any]]:
        if entered:
            raise RuntimeError(
                "something failed in a benchmark of failure-free training: its figures are void"
            )
        entered.append(1)
        return blocks(trainer, pattern, block, recorder)

    found = trainer.training.run(train)
    rank = torch.distributed.get_rank()
    parameters = sum(p.numel() for p in trainer.model[0].parameters())
    h2h, snapshots = sent(rank)
    report = {
        "blocks": found,
        "parameters": parameters,
        "state_bytes": state_bytes(),
        "h2h_bytes": h2h,
        "h2h_snapshots": snapshots,
    }
    Path(out, f"rank-{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

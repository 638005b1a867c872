"""Roles as processes with process groups of their own, over gloo, one of which goes wrong.

What each does in a step is that of the simulated ones (`hangs_simulated.step`), with operations of the `ft`
backend; their flight records are read as an agent reads them, from memory that they share.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context
from random import Random
from typing import Any

import torch
from torch import distributed as dist

from benchmarks import hangs_simulated as simulated
from benchmarks.hangs_how import ASTRAY, HANGS
from benchmarks.hangs_simulated import Action, Do, Fault, Layout, Wait
from ft_core.comm import backend
from ft_core.comm.process_group import Communicators
from ft_core.comm.rendezvous_server import Stores
from ft_core.node.workers.flight import Recorded, read
from ft_core.process.awake import AwakeClock
from ft_core.protocol.flight import FlightLog
from ft_core.state.memory import ControlBlock, SharedMemory, Word

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["ft_core.comm.process_group", "benchmarks.hangs_how"])
KINDS = (*HANGS, *ASTRAY)
LAYOUTS = (
    Layout(dp=2),
    Layout(dp=4, overlap=True),
    Layout(tp=2, dp=2, overlap=True),
    Layout(pp=2, dp=2, microbatches=4),
    Layout(pp=4),
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=2, pp=2, dp=2, overlap=True),
    Layout(dp=4, ep=2),
    Layout(tp=2, dp=4, ep=2),
)
QUIET = 2.0
"""Seconds in which no role begins or ends an operation, where all hang; those that the machine stalls for do
not count."""
PATIENCE = 60.0
"""Seconds in which something becomes of it."""
_SECRET = b"of roles that hang"
_SPEED = 0.05
"""Of simulated seconds."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: `hung`, `raised` where an operation failed of it instead, or `nothing`."""

    what: str
    logs: list[FlightLog]
    words: str = ""


def drawn(seed: int, kind: str = "") -> tuple[Layout, Fault]:
    """A fault, of this kind if one is given."""
    rng = Random(seed)
    layout = rng.choice(LAYOUTS)
    kind = kind or rng.choice(KINDS)
    return layout, Fault(kind, rng.randrange(layout.roles), rng.randrange(2, 6), rng.randrange(1 << 16))


# -- a role ----------------------------------------------------------------------------------------


def _script(layout: Layout, fault: Fault, role: int, number: int) -> list[Action]:
    """What a role does in a step. One that hangs computes for ever."""
    actions = list(simulated.step(layout, role, number, eval_every=5))
    if role != fault.role or number != fault.step:
        return actions
    known = replace(fault, kind="loader" if fault.kind in HANGS else fault.kind)
    return simulated.spoil(actions, known, inside=False)


def _play(role: int, layout: Layout, fault: Fault, memory: list[int], store: str, pipe: Any) -> None:
    """A role's process."""
    os.setsid()  # it ends with its loaders
    torch.set_num_threads(1)

    def end() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        os.killpg(0, signal.SIGKILL)

    def failed(reason: str) -> None:
        pipe.send(("raised", reason))

    threading.Thread(target=end, daemon=True).start()
    control = ControlBlock(SharedMemory.open(memory))
    comms = Communicators(role, layout.roles, failed, _SECRET, flight=control.flight)
    backend.install(comms)
    comms.swap(1, store)
    try:
        dist.init_process_group("gloo")
        _train(role, layout, fault, comms, control, pipe)
        pipe.send(("ended", ""))
    except Exception as error:
        pipe.send(("raised", f"{type(error).__name__}: {error}"))
    threading.Event().wait()


def _train(role: int, layout: Layout, fault: Fault, comms: Communicators, control: Any, pipe: Any) -> None:
    every = {
        (each.members, each.ordinal): None
        for who in range(layout.roles)
        for each in simulated.step(layout, who, 4, eval_every=5)
        if isinstance(each, Do)
    }
    groups = {key: dist.new_group(list(key[0])) for key in sorted(every)}
    comms.end_startup()
    for number in range(fault.step + 4):
        comms.flight.step = control[Word.VERSION] = number
        apart: list[Any] = []
        for action in _script(layout, fault, role, number):
            if isinstance(action, Wait):
                for work in apart:
                    work.wait()
                apart.clear()
            elif isinstance(action, Do):
                with torch.set_grad_enabled(action.grad):
                    work = _issue(action, groups[action.members, action.ordinal])
                if action.apart:
                    apart.append(work)
            elif action.seconds < math.inf:
                time.sleep(action.seconds * _SPEED)
            else:
                pipe.send(("hangs", ""))
                HANGS[fault.kind]()


def _issue(do: Do, group: Any) -> Any:
    tensor = torch.zeros(do.nbytes, dtype=torch.uint8)
    match do.kind:
        case "all_reduce":
            return dist.all_reduce(tensor, group=group, async_op=do.apart)
        case "all_gather":
            parts = [torch.zeros_like(tensor) for _ in do.members]
            return dist.all_gather(parts, tensor, group=group, async_op=do.apart)
        case "all_to_all":
            return dist.all_to_all_single(torch.zeros_like(tensor), tensor, group=group, async_op=do.apart)
        case "send":
            return dist.send(tensor, do.peer, group=group)
        case "recv":
            return dist.recv(tensor, do.peer, group=group)
    raise AssertionError(do)


# -- all of them -----------------------------------------------------------------------------------


def run(layout: Layout, fault: Fault) -> Outcome:
    """Real processes, until nothing moves any more. Leaves none."""
    store = Stores.in_thread("127.0.0.1", _SECRET)
    there: list[Recorded] = []
    pipes: list[Any] = []
    processes: list[Any] = []
    try:
        for role in range(layout.roles):
            ours, theirs = CONTEXT.Pipe()
            control = ControlBlock.create()
            about = role, layout, fault, control.memory.address, store.address, theirs
            process = CONTEXT.Process(target=_play, args=about)
            process.start()
            theirs.close()
            there.append(Recorded(process.pid, control))
            pipes.append(ours)
            processes.append(process)
        return _watch(there, pipes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _watch(there: list[Recorded], pipes: list[Any]) -> Outcome:
    moments: object = None
    clock = AwakeClock(0.2)
    since, start = clock.now, time.monotonic()
    ended = 0
    while time.monotonic() < start + PATIENCE:
        clock.tick()
        ready: list[Any] = connection.wait(pipes, 0.05)
        for pipe in ready:
            try:
                what, words = pipe.recv()
            except (EOFError, OSError):
                return Outcome("raised", [], "its process has ended")
            if what == "raised":
                return Outcome("raised", [], words)
            ended += what == "ended"
        if ended == len(there):
            return Outcome("nothing", [])
        logs = [read(each, False) for each in there if each.role >= 0]
        newest = [[(r.started, r.ended) for r in log.records] for log in logs]
        if newest != moments or len(logs) < len(there) or not all(log.records for log in logs):
            moments, since = newest, clock.now
        elif clock.now > since + QUIET:
            return Outcome("hung", logs)
    raise TimeoutError(f"nothing has become of it in {PATIENCE:.0f} s")

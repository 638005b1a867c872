"""A small job for the tests of process groups: one process per role, the test's process is the controller."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing import connection, get_context
from typing import Any

import torch
from torch import distributed as dist

from ft_core.comm import backend
from ft_core.comm.process_group import Communicators
from ft_core.comm.rendezvous_server import Stores
from ft_core.errors import EpochChanged
from ft_core.protocol.groups import RecordCount, Series
from ft_core.state.memory import ControlBlock

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.core.comm.pg_preload"])
PATIENCE = 60.0
SECRET = b"of these tests"


class Worker:
    """A worker's side: its communicators and what its session would do."""

    def __init__(self, role: int, world: int, control: Any, up: Any, plan: tuple[Any, ...]) -> None:
        self.role, self.world, self.epoch = role, world, plan[0]
        self._control, self._up, self._lock = control, up, threading.Lock()
        self._ready = threading.Condition()
        self._plan, self._entries = plan, None
        self.pending = plan[0]
        self._question = 0
        self.store = plan[1]
        self.training = False
        self.newcomer = plan[0] > 1
        self.failures: list[str] = []
        self.go = threading.Event()
        self.control = ControlBlock.create()
        flight = self.control.flight
        self.comms = Communicators(role, world, self._failed, SECRET, failure_grace=20.0, flight=flight)
        backend.install(self.comms)
        self.comms.swap(*plan, self._fetch, newcomers=[role] if self.newcomer else [])
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, kind: str, *values: Any) -> None:
        with self._lock:
            self._up.send((kind, self.role, *values))

    def _failed(self, reason: str, by_link: bool = False) -> None:
        self.failures.append(reason)
        self.tell("failed", reason)

    def _fetch(self, holder: int, series: Series, start: int) -> Any:
        self._entries = None
        self._question += 1  # an answer to an older one may still be on its way
        self.tell("fetch", holder, series, start, self._question)
        with self._ready:
            self._ready.wait_for(lambda: self._entries is not None or self.pending > self.comms.epoch)
            if self._entries is None:
                raise EpochChanged("overtaken")
            return self._entries

    def _watch(self) -> None:
        while True:
            kind, *values = self._control.recv()
            if kind == "abort":
                self.comms.abort(values[0])
                with self._ready:
                    self.pending = values[0]
                    self._ready.notify_all()
                self.tell("counts", values[0], self.comms.startup_counts())
            elif kind == "plan":
                if not self.training:
                    self.comms.swap(*values, self._fetch)
                    self.epoch = values[0]
                with self._ready:
                    self._plan = tuple(values)
                    self._ready.notify_all()
            elif kind == "entries":
                asker, series, start, question = values
                self.tell("entries", asker, question, self.comms.startup_entries(series, start))
            elif kind == "fetched":
                with self._ready:
                    if values[0] == self._question:
                        self._entries = values[1]
                        self._ready.notify_all()
            elif kind == "go":
                self.go.set()
            elif kind == "exit":
                os._exit(0)

    def begin_training(self) -> None:
        self.comms.end_startup()
        self.training = True

    def next_epoch(self) -> None:
        """What the main thread does after EpochChanged."""
        with self._ready:
            self._ready.wait_for(lambda: self._plan[0] == self.pending > self.epoch)
            plan = self._plan
        self.comms.swap(*plan, self._fetch)
        self.comms.reset()
        self.epoch = plan[0]


def _main(
    role: int,
    world: int,
    control: Any,
    up: Any,
    plan: tuple[Any, ...],
    script: str,
    args: Any,
    environment: dict[str, str],
) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    room, _, name = script.rpartition(":")
    scripts = import_module(f"core.comm.{room or 'pg'}_scripts")  # here: some import much
    worker = Worker(role, world, control, up, plan)
    try:
        worker.tell("result", getattr(scripts, name)(worker, *args))
    except BaseException as error:
        worker.tell("error", type(error).__name__, str(error), traceback.format_exc())
    threading.Event().wait()


def over_gloo(world: int, target: Callable[..., None]) -> list[dict[str, Any]]:
    """What `target(rank, world, port of a store, pipe)` sends of each rank, over torch's own groups."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = CONTEXT.Pipe()
        about = (rank, world, store.port, theirs)
        processes.append(CONTEXT.Process(target=target, args=about, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(60)
        process.kill()
    return results


class GroupJob:
    """The controller's side. Use as a context manager: it kills what is left."""

    def __init__(
        self, world: int, script: str, *args: Any, environment: dict[str, str] | None = None
    ) -> None:
        self.world, self._script, self._args = world, script, args
        self._environment = environment or {}
        self.epoch = 1
        self.events: list[tuple[Any, ...]] = []
        self._condition = threading.Condition()
        self.store = Stores.in_thread("127.0.0.1", SECRET).address
        self.processes: dict[int, Any] = {}
        self._controls: dict[int, Any] = {}
        self._ups: dict[int, Any] = {}

    def __enter__(self) -> GroupJob:
        plan = (1, self.store, {})
        for role in range(self.world):
            self._spawn(role, plan, self._args)
        threading.Thread(target=self._route, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        processes, self.processes = self.processes, {}
        for process in processes.values():
            process.kill()
            process.join()

    def _spawn(self, role: int, plan: tuple[Any, ...], args: Any) -> None:
        control, theirs = CONTEXT.Pipe()
        up, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_main,
            args=(role, self.world, theirs, sender, plan, self._script, args, self._environment),
            daemon=True,
        )
        process.start()
        theirs.close()
        sender.close()
        with self._condition:
            self.processes[role], self._controls[role], self._ups[role] = process, control, up

    def _route(self) -> None:
        while True:
            for up in connection.wait(list(self._ups.values()), 0.05):
                try:
                    message = up.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    with self._condition:  # a newcomer may be added
                        self._ups = {r: u for r, u in self._ups.items() if u is not up}
                    continue
                kind, role, *values = message
                if kind == "fetch":
                    with contextlib.suppress(OSError):  # killed meanwhile; the next epoch names another
                        self._controls[values[0]].send(("entries", role, *values[1:]))
                elif kind == "entries":
                    with contextlib.suppress(OSError):
                        self._controls[values[0]].send(("fetched", *values[1:]))
                else:
                    with self._condition:
                        self.events.append(message)
                        self._condition.notify_all()

    def wait(self, kind: str, roles: Any = None, *prefix: Any) -> dict[int, tuple[Any, ...]]:
        """Events of a kind from all `roles` (default: all), whose first values are `prefix`."""
        wanted = set(range(self.world) if roles is None else roles)
        deadline = time.monotonic() + PATIENCE
        with self._condition:
            while True:
                found = {
                    e[1]: e[2:]
                    for e in self.events
                    if e[0] == kind and e[1] in wanted and e[2 : 2 + len(prefix)] == prefix
                }
                if found.keys() >= wanted:
                    return found
                errors = [e for e in self.events if e[0] == "error"]
                if errors and kind != "error":
                    raise AssertionError(f"role {errors[0][1]}: {errors[0][4]}")
                if not self._condition.wait(deadline - time.monotonic()):
                    raise AssertionError(
                        f"no {kind} {prefix} from {wanted - found.keys()}; had {self.events}"
                    )

    def go(self, role: int) -> None:
        self._controls[role].send(("go",))

    def kill(self, *roles: int) -> None:
        for role in roles:
            os.kill(self.processes[role].pid, signal.SIGKILL)
            self.processes[role].join()

    def next_epoch(self, lost: Any, args: Any = None) -> None:
        """Abort, collect counts, begin the next epoch with newcomers in the lost roles."""
        self.epoch += 1
        survivors = [r for r in range(self.world) if r not in lost]
        for role in survivors:
            self._controls[role].send(("abort", self.epoch))
        completed: dict[RecordCount, tuple[int, int]] = {}
        for role, (_, counts) in self.wait("counts", survivors, self.epoch).items():
            for name, count in counts.items():
                if count > completed.get(name, (0, -1))[0]:
                    completed[name] = count, role
        plan = (self.epoch, self.store, completed)
        for role in survivors:
            self._controls[role].send(("plan", *plan))
        for role in lost:
            self._spawn(role, plan, self._args if args is None else args)

    def results(self) -> list[Any]:
        return [self.wait("result")[role][0] for role in range(self.world)]

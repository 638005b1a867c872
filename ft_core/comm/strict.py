"""A backend for tests: gloo's bytes under NCCL's rules, so that what hangs on a GPU hangs on a CPU.

`FT_COMM=strict` in the environment of `ftrun` puts it in gloo's place. Its rules are those of torch's
`ProcessGroupNCCL` and of NCCL, as far as they can be kept on a host:

- Operations of a communicator run one after the other, in the order of issue, in a thread of its own. Each
  begins once what the training thread's stream waits for is done.
- `wait` returns at once: the stream waits, not the host. What the operation reads or writes is pending, and
  the first call that touches it waits for it (`_Touch`). Results appear at the end, all at once.
- A single send of more than `BUFFER` bytes ends when it is received, and all that is issued after it waits;
  those between group start and end go on together. Groups nest, are a thread's own, and are of all of its
  communicators: one that is not ended holds back all that the thread issues.
- A communicator opened with its device known is another one than one that is opened by the first operation,
  which blocks the thread that issues it. Members that differ in this wait for each other for ever.
- No more than `LAUNCHES` operations are queued: who issues one more waits.
- A lost peer is not noticed: the operation does not end. `abort` ends all, from any thread, without an error
  and with garbage as their results; what is issued later is done at once, with garbage as well.
- An error of the link counts as the end of the operations for `is_completed`; only `get_error` tells of it.
- Tags are ignored. There is no receive from any source.

`FT_STRICT_FAULT=KIND:ROLE:NUMBER` lets a role's communicators fail: with `link` in their operation of this
number in epoch 1, with `abort` each abort in epoch 1 takes so many seconds; in the epoch of this number, with
`opening` the role never comes out of opening one, and with `memory` its device has no room for one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from ft_core.process import stream

BUFFER = 1 << 10
"""Bytes of single sends that may be on their way before they are received, for each receiver. NCCL's are some
4 MiB, and what tests send is smaller by as much."""

LAUNCHES = 1024
"""Operations that a communicator has queued at most."""

OPENING = 0.005
"""Seconds that a communicator takes to open beyond the meeting of its members."""

NAME = "strict"
_FAULT = "FT_STRICT_FAULT"
_GARBAGE = 0x7F
"""What each byte of garbage is: a number that is large in any type."""

_WRITES_NOTHING = ("send", "barrier", "monitored_barrier")
_POINT_TO_POINT = ("send", "recv")


def wanted() -> bool:
    """Whether this process is to use it."""
    return os.environ.get("FT_COMM") == NAME


def in_place_of(devices: Mapping[str, str]) -> dict[str, str]:
    """The backends that do the work, by type of device."""
    return {d: NAME if kind == "gloo" and wanted() else kind for d, kind in devices.items()}


class Operation:
    """What a communicator does at once: one call of a collective, or all of a group."""

    def __init__(self, calls: list[_Call], after: stream.Event) -> None:
        """`after`: where the caller's stream has to come to before."""
        self.calls, self.after = calls, after
        self.done = threading.Event()
        """Whether its results are there, or garbage in their place."""
        self._lock = threading.Lock()

    def tensors(self) -> list[torch.Tensor]:
        """All that it reads and writes."""
        return [tensor for call in self.calls for tensor in _tensors((call.args, call.kwargs))]

    def ends(self, results: Iterable[tuple[torch.Tensor, torch.Tensor]] | None) -> None:
        """Once: its results are there, as pairs of (to, from); None: garbage."""
        with self._lock, torch.inference_mode():
            if self.done.is_set():
                return
            if results is not None:
                for to, source in results:
                    to.data.copy_(source)  # of which autograd is not told
            else:
                for call in self.calls:
                    call.spoil()
            self.done.set()
        running.discard(self)


class _Call:
    """One call of a collective."""

    def __init__(self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._rank = rank
        # A kernel has the memory, whatever the script makes of the tensor before it runs.
        self.method, self.args, self.kwargs = method, _aliases(args), _aliases(kwargs)

    def outputs(self) -> list[torch.Tensor]:
        """What it writes: a broadcast nothing at its root, a reduction to one member nothing elsewhere."""
        root = next((o.rootRank for o in self.args if hasattr(o, "rootRank")), None)
        idle = {"broadcast": root == self._rank, "reduce": root != self._rank}.get(self.method, False)
        return [] if idle or self.method in _WRITES_NOTHING else _tensors(self.args[:1])

    def spoil(self) -> None:
        """Leave garbage as its results. A gather in place never writes the part that is this member's own."""
        own = _tensors(self.args[1:2]) if "gather" in self.method else []
        kept = [tensor.clone() for tensor in own]
        for tensor in self.outputs():
            tensor.data.copy_(_garbage(tensor))
        for tensor, value in zip(own, kept, strict=True):
            tensor.data.copy_(value)

    def nbytes(self) -> int:
        """What it moves."""
        return sum(t.nbytes for t in _tensors(self.args[:1]))

    def staged(self) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """(copies of what it writes, its arguments with copies in the tensors' places)."""
        copies: dict[int, torch.Tensor] = {}
        args, kwargs = _copied(self.args, copies), _copied(self.kwargs, copies)
        if self.method in _POINT_TO_POINT:
            args = (*args[:2], 0, *args[3:])
        return [copies[id(t)] for t in self.outputs()], args, kwargs


class Communicator:
    """In the place of a `ProcessGroup` inside of one of ours; `open` makes gloo's."""

    def __init__(self, rank: int, opening: Callable[[bool], Any], fault: Fault) -> None:
        """`opening(eager)` connects to the other members and returns gloo's group, with which `eager` ones
        meet eager ones only."""
        self._rank, self._opening = rank, opening
        self._gloo: Any = None
        self._condition = threading.Condition()
        self._queue: deque[Operation] = deque()
        self._running: Operation | None = None
        self._sent: dict[int, deque[tuple[int, Any]]] = {}
        """Bytes and work of the buffered sends that are on their way, by receiver."""
        self._over = False
        self._fault, self._number = fault, 0
        self.error: Exception | None = None

    def open(self, eager: bool) -> None:
        """Connect to the other members."""
        if self._fault.hangs:
            threading.Event().wait()
        if not self._fault.room:
            raise dist.DistBackendError(
                "ncclUnhandledCudaError: Cuda failure 2 'out of memory', as it was told to"
            )
        gloo = self._opening(eager)
        time.sleep(OPENING)
        with self._condition:
            self._gloo = gloo
        threading.Thread(target=self._run, name="ft-strict", daemon=True).start()

    def __getattr__(self, name: str) -> Callable[..., Work | None]:
        if name.startswith("__") or not hasattr(dist.ProcessGroup, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.issue(name, args, kwargs)

    def get_error(self) -> Any:
        """What only this tells: whether the link has failed."""
        kind = torch._C._distributed_c10d.ErrorType
        return kind.SUCCESS if self.error is None else kind.COMM_ERROR

    def issue(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
        """Queue an operation; inside of a group it is done with the group's others."""
        if method == "recv_anysource":
            raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")
        call = _Call(self._rank, method, args, kwargs)
        if _group.depth:
            _group.calls.append((self, call))
            return None
        return self._enqueue([call])

    def _enqueue(self, calls: list[_Call]) -> Work:
        operation = Operation(calls, training.event())
        running.add(operation)
        if self._gloo is None and not self._over:
            self.open(eager=False)
        with self._condition:
            self._condition.wait_for(lambda: len(self._queue) < LAUNCHES or self._over)
            if self._over:
                operation.ends(None)
            else:
                self._queue.append(operation)
                self._condition.notify_all()
        return Work(self, operation)

    def abort(self) -> None:
        """End all there is and will be. Any thread."""
        time.sleep(self._fault.abort)
        with self._condition:
            self._over = True
            pending = [*([self._running] if self._running else []), *self._queue]
            self._queue.clear()
            self._condition.notify_all()
        for operation in pending:
            operation.ends(None)

    def shutdown(self) -> None:
        """Wait for all that is queued."""
        with self._condition:
            self._condition.wait_for(lambda: self._over or not (self._queue or self._running))

    def set_timeout(self, timeout: timedelta) -> None:
        """Nobody here ends anything of its own accord."""

    def _start_coalescing(self, device: Any = None) -> None:
        _group.depth += 1  # NCCL's group start

    def _end_coalescing(self, device: Any = None) -> Work | None:
        _group.depth -= 1
        if _group.depth:
            return None
        calls, _group.calls = _group.calls, []
        works = {}
        for communicator in {c for c, _ in calls}:
            works[communicator] = communicator._enqueue([call for c, call in calls if c is communicator])
        return works.get(self)

    # -- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._over)
                if self._over:
                    return
                operation = self._running = self._queue.popleft()
                self._condition.notify_all()
            operation.after.synchronize()
            self._number += 1
            try:
                if self._number == self._fault.operation:
                    raise dist.DistBackendError("ncclRemoteError: the link has failed, as it was told to")
                results = self._execute(operation)
            except Exception as error:
                if self._number == self._fault.operation:
                    self.error = error
                return  # who waits does so until somebody aborts
            operation.ends(results)
            with self._condition:
                self._running = None
                self._condition.notify_all()

    def _execute(self, operation: Operation) -> list[tuple[torch.Tensor, torch.Tensor]]:
        together = len(operation.calls) > 1
        works: list[Any] = []
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        for call in operation.calls:
            copies, args, kwargs = call.staged()
            results += zip(call.outputs(), copies, strict=True)
            if call.method == "barrier":
                kwargs, args = {}, ()
            work = getattr(self._gloo, call.method)(*args, **kwargs)
            if call.method == "send" and not together and call.nbytes() <= BUFFER:
                self._is_on_its_way(args[1], call.nbytes(), work)
            elif work is not None:
                works.append(work)
        for work in works:
            work.wait()
        return results

    def _is_on_its_way(self, receiver: int, nbytes: int, work: Any) -> None:
        sent = self._sent.setdefault(receiver, deque())
        sent.append((nbytes, work))
        while sent and (sum(n for n, _ in sent) > BUFFER or sent[0][1].is_completed()):
            sent.popleft()[1].wait()


class Work:
    """An operation under way, as torch's `WorkNCCL` shows it."""

    def __init__(self, communicator: Communicator, operation: Operation) -> None:
        self._communicator, self._operation = communicator, operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The training thread's stream waits for it; so does the host where it has a limit, or for a barrier,
        or is another thread."""
        operation = self._operation
        training.waits_for(operation)
        barrier = any(call.method.endswith("barrier") for call in operation.calls)
        if timeout is not None and not operation.done.wait(timeout.total_seconds()):
            raise dist.DistBackendError(f"an operation has not ended within {timeout}")
        if barrier or not training.is_current():
            operation.done.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or of an error."""
        return self._operation.done.is_set() or self._communicator.error is not None

    def is_success(self) -> bool:
        """Whether it has ended well, as far as it knows."""
        return self._communicator.error is None

    def exception(self) -> Exception | None:
        """The error of its link."""
        return self._communicator.error

    def result(self) -> list[torch.Tensor]:
        """What it writes."""
        return [tensor for call in self._operation.calls for tensor in call.outputs()]

    def get_future(self) -> torch.futures.Future[Any]:
        """Complete at once: who uses its value waits."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future

    synchronize = block_current_stream = wait


class _Place:
    """Behind operations that the stream waits for."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations

    def query(self) -> bool:
        return all(operation.done.is_set() for operation in self._operations)

    def synchronize(self) -> None:
        for operation in self._operations:
            operation.done.wait()


class TrainingStream:
    """What the training thread has given its device: the host computes, so this is what it waits for."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._behind: list[Operation] = []
        self._pending: dict[int, list[Operation]] = {}
        """By storage."""

    def begin(self) -> None:
        """This thread trains."""
        self._thread = threading.get_ident()
        stream.stand_in = self
        _Touch().__enter__()
        for name in ("numpy", "tolist", "untyped_storage"):  # ways to the bytes that are no operation
            setattr(torch.Tensor, name, _touching(getattr(torch.Tensor, name)))

    def is_current(self) -> bool:
        """Whether this is the thread."""
        return threading.get_ident() == self._thread

    def waits_for(self, operation: Operation) -> None:
        """What comes behind it in the stream begins when it has ended."""
        if not self.is_current() or operation.done.is_set():
            return
        self._behind = [o for o in self._behind if not o.done.is_set()]
        under_way = {at: [o for o in each if not o.done.is_set()] for at, each in self._pending.items()}
        self._pending = {at: each for at, each in under_way.items() if each}
        self._behind.append(operation)
        for tensor in operation.tensors():
            self._pending.setdefault(_storage(tensor), []).append(operation)

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """The host reads or writes these."""
        if self._pending and self.is_current():
            for tensor in tensors:
                for operation in self._pending.pop(_storage(tensor), ()):
                    operation.done.wait()

    def event(self) -> _Place:
        """As `Device.event`. Another thread has no stream."""
        return _Place([o for o in self._behind if not o.done.is_set()] if self.is_current() else [])

    def settle(self) -> None:
        """As `Device.settle`."""
        self.event().synchronize()

    def drain(self) -> None:
        """As `Device.drain`."""
        _Place(list(running)).synchronize()


class _Touch(TorchDispatchMode):
    """Waits for what is pending before an operation uses it. Views use nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it is made of other tensors, and this is called with those next
        if training._pending and not getattr(func, "is_view", False):
            training.touch(_tensors((args, kwargs)))
        return func(*args, **(kwargs or {}))


class _Group(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Communicator, _Call]] = []


_group = _Group()
running: set[Operation] = set()
"""All that have not ended."""
training = TrainingStream()


class Fault(NamedTuple):
    """What is wrong with a communicator."""

    operation: int = -1
    """In which its link fails."""
    abort: float = 0
    """Seconds that an abort takes before anything ends."""
    hangs: bool = False
    """Whether its opening never ends."""
    room: bool = True
    """Whether the device has memory for it."""


def fault_of(role: int, epoch: int) -> Fault:
    """What the environment says of a role's communicators in an epoch."""
    kind, whose, number = (*os.environ.get(_FAULT, "").split(":"), "", "")[:3]
    if whose == str(role):
        match kind:
            case "opening":
                return Fault(hangs=epoch == int(number))
            case "memory":
                return Fault(room=epoch != int(number))
            case "link" if epoch == 1:
                return Fault(operation=int(number))
            case "abort" if epoch == 1:
                return Fault(abort=float(number))
    return Fault()


def _touching(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        training.touch([self])
        return original(self, *args, **kwargs)

    return call


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    with torch._C.DisableTorchFunction():  # a mode of the script's would come to `_touching`
        return torch._C.TensorBase.untyped_storage(tensor)._cdata


def _garbage(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.full((tensor.numel() * tensor.element_size(),), _GARBAGE, dtype=torch.uint8)
    return flat.view(tensor.dtype).view(tensor.shape) if tensor.dtype != torch.bool else tensor


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _aliases(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone(memory_format=torch.contiguous_format)
        return copies[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, copy, value)

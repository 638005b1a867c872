"""Whether an adapter puts back all that a step depends on, whatever the step was doing when it was left.

    collectives = Collectives()  # before the framework is imported: some keep torch's functions
    check(lambda seed: MyTraining(seed), collectives)

On the ranks of a plain process group, started by torchrun, say; no job is needed. A training is interrupted
at each of its collectives in turn, then reset, restored, and trained on: losses, state and weights must be
those of the training that nobody interrupted, to the bit. So must those of a newcomer, with other weights,
random states and no moments yet.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ft_core.adapter import Adapter
from ft_core.errors import EpochChanged
from ft_core.state import envelope

_COLLECTIVES = (
    "all_reduce all_reduce_coalesced broadcast broadcast_object_list reduce reduce_scatter "
    "reduce_scatter_tensor all_gather all_gather_into_tensor all_gather_object barrier "
    "all_to_all_single all_to_all"
).split()
_PAIRS = ("send", "recv", "isend", "irecv")
_MESSAGES = {"dst": 1, "src": -1}
"""Kinds of operations that begin or end a message, between the source and the destination."""
Operation = tuple[str, tuple[int, ...]]
"""A kind, and the ranks without which it does not complete."""


class Training(Protocol):
    """What is tried: a model in training, that a factory makes anew, with weights by a seed."""

    adapter: Adapter
    """The one that is tried."""

    def step(self, version: int) -> Any:
        """Do the step that the state of `version` is next to see, whatever batches that has; return what it
        tells of it, its loss say."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What the next forward pass computes with, as far as this rank has it, also what no version has."""


class Interrupted(EpochChanged):
    """A collective is not done: the epoch is over, as it were."""


class Collectives:
    """Counts what this rank communicates, and raises `Interrupted` in place of a given operation."""

    def __init__(self) -> None:
        """From here on, whoever takes a function of `torch.distributed` gets one that counts."""
        self.log: list[Operation] = []
        self.stop: int | None = None
        """After how many operations it raises."""
        self._inside = False
        self._works: list[Any] = []
        """Operations that nobody has waited for."""
        for name in (*_COLLECTIVES, *_PAIRS):
            counted = self._counted(name, getattr(dist, name))
            setattr(dist, name, counted)
            if name in _PAIRS:  # torch compares with these what a batch of sends and receives is made of
                setattr(distributed_c10d, name, counted)

    def begin(self, stop: int | None = None) -> None:
        """Count anew, once what a step has left under way has ended, as communicators end with an epoch."""
        self.log, self.stop = [], stop
        for work in self._works:
            work.wait()
        self._works = []

    def passed(self, kind: str, ranks: tuple[int, ...]) -> None:
        """An operation is about to be issued, or waited for."""
        if self.stop is not None and len(self.log) >= self.stop:
            raise Interrupted(f"{kind} {ranks}")
        self.log.append((kind, ranks))

    def wait(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        """The step waits for an operation, and may be interrupted there."""
        self.passed("wait", (dist.get_rank(),))
        self._works = [each for each in self._works if each is not work]
        return work.wait(*args, **kwargs)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # torch makes one of another
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            ranks = tuple(dist.get_process_group_ranks(group))
            if name in _PAIRS:
                side = "dst" if "send" in name else "src"
                peer = given.get(side)
                peer = ranks[given[f"group_{side}"]] if peer is None else peer
                pair = dist.get_rank(), peer
                self.passed(side, pair if side == "dst" else pair[::-1])
            else:
                self.passed(name, ranks)
            self._inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            if isinstance(result, distributed_c10d._IllegalWork):  # one of several that go out as one
                return result
            if not hasattr(result, "wait"):
                return result
            self._works.append(result)
            return _Work(result, self)

        return counted

    def moments(self) -> list[int]:
        """After how many of its own operations, as counted, this rank is to be interrupted, for each moment
        that all ranks can be stopped at: what any of them has issued completes, and no message is left."""
        logs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(logs, list(self.log))
        heads, me, found = [0] * len(logs), dist.get_rank(), [0]
        under_way: Counter[tuple[int, ...]] = Counter()
        while any(head < len(log) for head, log in zip(heads, logs, strict=True)):
            ready = [log[head] if head < len(log) else None for head, log in zip(heads, logs, strict=True)]
            for rank in _next(ready, under_way):
                kind, ranks = ready[rank] or ("", ())
                under_way[ranks] += _MESSAGES.get(kind, 0)
                heads[rank] += 1
            if not any(under_way.values()):
                found.append(heads[me])
        return found[:-1]  # but for the end


def _next(ready: list[Operation | None], under_way: Counter[tuple[int, ...]]) -> list[int]:
    """Which ranks go on, of what each does next: those that complete a message, else what waits for nobody
    else, else those that begin one."""
    operations = [(rank, *operation) for rank, operation in enumerate(ready) if operation is not None]
    messages = [(rank, under_way[ranks] * _MESSAGES[k]) for rank, k, ranks in operations if k in _MESSAGES]
    others = [
        rank
        for rank, kind, ranks in operations
        if kind not in _MESSAGES and all(ready[peer] == (kind, ranks) for peer in ranks)
    ]
    found = [rank for rank, left in messages if left < 0] or others or [rank for rank, _ in messages]
    assert found, f"no operation can complete: {ready}"
    return found


class _Work:
    """An operation under way: the step may be interrupted as it waits for it."""

    def __init__(self, work: Any, collectives: Collectives) -> None:
        self._work, self._collectives = work, collectives

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._collectives.wait(self._work, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@dataclass(frozen=True)
class Snapshot:
    """A version, as the engine would have it; and the weights."""

    tensors: dict[str, torch.Tensor]
    envelope: bytes
    weights: dict[str, torch.Tensor]

    @classmethod
    def take(cls, training: Training) -> Snapshot:
        """The training as it is."""
        found = list(training.adapter.tensors())
        names = [each.name for each in found]
        assert len(names) == len(set(names)), f"names come twice: {names}"
        return cls(
            {each.name: each.tensor.detach().clone() for each in found},
            envelope.encode(training.adapter.envelope()),
            {name: weight.detach().clone() for name, weight in training.weights().items()},
        )

    def compare(self, expected: Snapshot, where: str) -> None:
        """Raises AssertionError for the first difference."""
        self.compare_weights(expected, where)
        assert list(self.tensors) == list(expected.tensors), (
            f"{where}: there is {list(self.tensors)}, and not {list(expected.tensors)}"
        )
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, expected.tensors[name]), f"{where}: {name} differs"
        if self.envelope != expected.envelope:
            here, there = envelope.decode(self.envelope), envelope.decode(expected.envelope)
            raise AssertionError(f"{where}: the envelope differs: {_differences(here, there)}")

    def compare_weights(self, expected: Snapshot, where: str) -> None:
        """The same of weights alone."""
        for name, weight in self.weights.items():
            assert torch.equal(weight, expected.weights[name]), f"{where}: {name} differs"


def _differences(here: Any, there: Any) -> Any:
    if not (isinstance(here, dict) and isinstance(there, dict)):
        return here, there
    keys = here.keys() | there.keys()
    return {k: (here.get(k), there.get(k)) for k in keys if repr(here.get(k)) != repr(there.get(k))}


class Trial:
    """One training, with what interrupts it and takes it back."""

    def __init__(self, training: Training, collectives: Collectives) -> None:
        self.training, self.collectives = training, collectives

    def train(self, first: int, last: int) -> list[Any]:
        """From version `first` to `last`: what the steps tell."""
        return [self.training.step(version) for version in range(first, last)]

    def snapshot(self) -> Snapshot:
        """The training as it is."""
        return Snapshot.take(self.training)

    def restore(self, snapshot: Snapshot, stop: int | None = None) -> None:
        """Drop what is under way and go back, as a worker does. `stop`: and be interrupted after so many
        operations of what makes the state whole.

        What the adapter is given is garbage afterwards: it belongs to the engine.
        """
        self.training.adapter.reset()
        given = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        self.training.adapter.restore(given, envelope.decode(snapshot.envelope))
        for tensor in given.values():
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
        self._derive(stop)

    def leave_at_once(self, version: int) -> None:
        """Begin the step after `version`, which the state is, leave it before its first operation, and go
        back: the adapter is given the state's own tensors, which the optimizer has not changed."""
        adapter = self.training.adapter
        volatile = {t.name: t.tensor.detach().clone() for t in adapter.tensors() if t.volatile}
        small = envelope.encode(adapter.envelope())
        self.interrupt(0, version)
        adapter.reset()
        live = {t.name: t.tensor.detach() for t in adapter.tensors()}
        adapter.restore(live | volatile, envelope.decode(small))
        self._derive(None)

    def _derive(self, stop: int | None) -> None:
        self.collectives.begin(stop)
        try:
            with torch.no_grad():
                self.training.adapter.derive()
        except Interrupted:
            pass
        finally:
            self.collectives.stop = None

    def interrupt(self, stop: int, version: int) -> None:
        """Leave the step after `version` after so many of its operations."""
        self.collectives.begin(stop)
        try:
            self.training.step(version)
        except Interrupted:
            pass
        finally:
            self.collectives.begin()

    def count(self, version: int) -> list[int]:
        """Do the step after `version`: the moments at which it can be interrupted."""
        self.collectives.begin()
        self.training.step(version)
        found = self.collectives.moments()
        self.collectives.begin()
        return found


def check_holders(training: Training, snapshot: Snapshot) -> None:
    """Those who are said to have the same do have the same, and they agree on it."""
    mine = {t.name: t.holders for t in training.adapter.tensors()}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (mine, snapshot.tensors))
    for name, holders in mine.items():
        assert dist.get_rank() in holders, f"{name}: this rank is none of its holders"
        for peer in holders:
            theirs, tensors = everybody[peer]
            assert theirs.get(name) == holders, f"{name}: {peer} disagrees on the holders"
            assert torch.equal(tensors[name], snapshot.tensors[name]), f"{name}: {peer} has another"


def check(make: Callable[[int], Training], collectives: Collectives, every: int = 1) -> int:
    """Try an adapter; all ranks call this. Returns how many interruptions were tried.

    `make`: makes a training whose weights and random states follow from a number. `every`: of a step, each
    so many-th moment alone is tried. Raises AssertionError with what differs, and after what.
    """
    trial = Trial(make(1), collectives)
    initial = trial.snapshot()
    early = trial.train(0, 2)
    at2 = trial.snapshot()
    told = trial.train(2, 4)
    at4 = trial.snapshot()
    check_holders(trial.training, at4)
    tried = 0

    def again(where: str, goes_back: bool = True) -> None:
        if goes_back:
            trial.restore(at2)
        trial.snapshot().compare(at2, f"{where}, restored")
        assert (now := trial.train(2, 4)) == told, f"{where}: the steps tell {now}, and not {told}"
        trial.snapshot().compare(at4, where)

    again("undisturbed")
    steady = trial.count(4)
    again("after a whole step")
    for stop in steady[::every]:
        trial.interrupt(stop, 4)
        again(f"interrupted in the step's operation {stop} of {len(steady)}")
    tried += len(steady[::every])

    trial.restore(at2)
    whole = collectives.moments()
    for stop in whole:
        trial.interrupt(steady[-1], 2)
        trial.restore(at2, stop)
        again(f"interrupted in the operation {stop} of {len(whole)} that make the state whole")
    trial.restore(at2)
    first = trial.count(2)
    if len(first) != len(steady):  # the first step after a restore communicates otherwise
        for stop in first[:: 3 * every]:
            trial.restore(at2)
            trial.interrupt(stop, 2)
            again(f"interrupted in the first step's operation {stop} of {len(first)}")
            tried += 1
    trial.restore(at2)
    trial.leave_at_once(2)
    again("left at once", goes_back=False)

    trial.restore(initial)
    trial.snapshot().compare(initial, "restored to the beginning")
    assert trial.train(0, 2) == early, "from the beginning: the steps tell something else"
    trial.snapshot().compare(at2, "from the beginning")

    newcomer = Trial(make(2), collectives)
    if dist.get_rank() == dist.get_world_size() - 1:
        trial = newcomer
    again("with a newcomer")
    return tried

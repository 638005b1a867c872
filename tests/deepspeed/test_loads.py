"""A newcomer's loaders give its script what the predecessor's gave, and load only what somebody looks at."""

from __future__ import annotations

import contextlib
import copy
import functools
import mmap
import pickle
import random
import time
from collections import UserDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, dataloader

from ft_deepspeed.loads import OTHERS, Loads
from ft_deepspeed.unread import Structure, Unread, UnreadBatch

Batch = Any
_HOOKED = {
    dataloader._BaseDataLoaderIter: ["_next_index", "__init__"],
    dataloader._SingleProcessDataLoaderIter: ["_next_data"],
    dataloader._MultiProcessingDataLoaderIter: ["_next_data", "_try_put_index", "_reset"],
    dataloader._DatasetKind: ["create_fetcher"],
}
_AFTER = 4
"""Steps that are done beyond those that are passed."""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, names in _HOOKED.items():
        for name in names:
            monkeypatch.setattr(kind, name, vars(kind)[name])


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Each says its number."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), float(index)), "y": torch.tensor(index)}


class Run:
    """A script with one loader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.position, self.loader = -1, loader
        self.loads = Loads(lambda: self.position)
        self.left_out = 0
        self.states: list[dict[str, Any]] = []
        """After each step."""

    def steps(
        self,
        steps: int,
        looks: Callable[[int, Batch], Any],
        until: int = 0,
        noted: dict[str, Any] | None = None,
        keeps: bool = True,
    ) -> list[Batch]:
        """All batches. `looks` is called with each in its step; `noted` is followed until step `until`."""
        torch.manual_seed(3)
        found: list[Batch] = []
        while len(found) < steps:
            for batch in self.loader:
                if self.position < 0:
                    self.position = 0
                    if noted is not None:
                        self.loads.follow(noted, until)
                looks(self.position, batch)
                found.append(batch if keeps or self.position >= until else None)
                self.position += 1
                self.states.append(self.loads.state())
                if self.position == until and noted is not None:
                    self.left_out = self.loads.left_out
                    assert self.loads.lead() == ""
                if self.position == steps:
                    break
        return found


def _read(batch: Batch) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in batch.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": None},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "prefetch_factor": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("until", [2, 11, 23])
@pytest.mark.parametrize("looks", [False, True])  # and keeps what it has seen
def test_batches_are_the_same(options: dict[str, Any], until: int, looks: bool) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Samples(), **{"batch_size": 4, "shuffle": True, **options})

    seen: dict[int, Any] = {}
    predecessor = Run(loader())
    predecessor.steps(until + _AFTER, lambda step, batch: seen.__setitem__(step, _read(batch)))
    noted = predecessor.states[until - 1]
    assert noted["same"]

    def look(step: int, batch: Batch) -> None:
        if looks and step % 3 == 0:
            assert {name: (value + 0).tolist() for name, value in batch.items()} == seen[step]
        if looks and step % 5 == 1:
            moved = batch["x"].to(torch.float64, non_blocking=True)[1:].long()
            assert moved.tolist() == torch.tensor(seen[step]["x"])[1:].long().tolist()

    newcomer = Run(loader())
    given = newcomer.steps(until + _AFTER, look, until, noted, keeps=looks)
    if until > 10 and not looks:
        assert newcomer.left_out > 0
    assert not any(isinstance(value, Unread) for batch in given[until:] for value in batch.values())
    for step, batch in enumerate(given):
        assert batch is None or _read(batch) == seen[step]


class Noisy(Samples):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(2)}


class Counting(Samples):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.count = getattr(self, "count", 0) + 1
        return super().__getitem__(index)


class Varying(Samples):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(2)} if index < 8 else super().__getitem__(index)


class Within(Samples):
    """What it reads from counts."""

    def __init__(self) -> None:
        self.dataset = Counting()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.dataset[index]


class Seldom(Samples):
    """Draws a random number for one sample."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(random.randint(0, 9) if index == 21 else index)


class Numbers(Samples):
    """Reads on."""

    def __init__(self) -> None:
        self.numbers = iter(range(1000))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(next(self.numbers))}


class OfFile(Samples):
    """Reads on, in a file."""

    def __init__(self) -> None:
        self.file = open(__file__, "rb")  # noqa: SIM115

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(self.file.read(1)[0])}


class Visited(Samples):
    """Counts how often it has been asked for each sample."""

    def __init__(self, visits: Any) -> None:
        self.visits = visits

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.visits[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "visits", [[0] * 400, np.zeros(400, int), np.zeros((400, 2)), dict.fromkeys(range(400), 0)], ids=type
)
def test_visits_of_samples_are_seen(visits: Any) -> None:
    loader = DataLoader(Visited(visits), 4, sampler=range(99, 139))
    run = Run(loader)
    run.position = 0
    list(loader)
    assert not run.loads.state()["same"]


class Slotted(Samples):
    class Count:
        __slots__ = ("number",)

    def __init__(self) -> None:
        self.count = Slotted.Count()
        self.count.number = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.count.number += 1
        return super().__getitem__(index)


class OfClass(Samples):
    count = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        OfClass.count += 1
        return super().__getitem__(index)


class Transformed(Samples):
    class Transform(torch.nn.Module):
        count = 0

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x

    def __init__(self) -> None:
        self.transform = Transformed.Transform()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.transform(super().__getitem__(index)["x"])}


class Opening(Samples):
    """Opens something for its first sample, and keeps it."""

    opened = False

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.opened = True
        return super().__getitem__(index)


class Costly(dict[str, int]):
    """Is not to be read by anybody who only looks."""

    def __getitem__(self, key: str) -> int:
        raise AssertionError

    __iter__ = __len__ = items = values = keys = __getitem__  # type: ignore[assignment]


def test_looking_does_nothing(tmp_path: Any) -> None:
    class Archive(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise AssertionError

        __iter__ = __len__ = __getitem__  # type: ignore[assignment]

    data = Opening()
    data.costly, data.archive = Costly(a=1), Archive()  # type: ignore[attr-defined]
    data.log = open(tmp_path / "log", "w")  # type: ignore[attr-defined]  # noqa: SIM115
    data.log.write("a line that is not flushed")  # type: ignore[attr-defined]
    run = Run(DataLoader(data, 4, num_workers=1))
    run.steps(8, lambda *_: None)
    assert run.states[-1]["same"]
    assert not (tmp_path / "log").read_text()


def test_data_that_the_script_changes_between_batches_are_told_of() -> None:
    run = Run(DataLoader(data := Samples(), 4))

    def change(step: int, batch: Batch) -> None:
        data.length = step  # type: ignore[attr-defined]

    run.steps(20, change)
    assert not run.states[-1]["same"]


@pytest.mark.parametrize(
    "sampler", [torch.randperm(40).split(4), [np.arange(4)] * 10, [[torch.tensor(1)] * 4] * 10, [(1, 2)] * 10]
)
def test_indices_of_any_type(sampler: Any) -> None:
    run = Run(DataLoader(Samples(), batch_sampler=[list(each) for each in sampler]))
    run.position = 0
    assert len(list(run.loader)) == 10
    if not isinstance(sampler[0], (list, tuple)):
        whole: Any = DataLoader(TensorDataset(torch.arange(40)), batch_size=None, sampler=sampler)
        assert len(list(whole)) == 10


def test_a_thread_that_looks_disturbs_nobody() -> None:
    newcomer = Run(DataLoader(Slow(), 2))
    newcomer.position = 0
    newcomer.loads.follow({"same": True, "newest": []}, 1000)
    with ThreadPoolExecutor(4) as pool:
        looked = []
        for batch in newcomer.loader:
            newcomer.position += 1
            looked.append(pool.submit(lambda batch=batch: batch["y"].tolist()))
        found = [each.result() for each in looked]
    assert found == [[at, at + 1] for at in range(0, 40, 2)]


class Slow(Samples):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.002)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iteration_that_nobody_saw_begin_is_told_of(workers: int) -> None:
    begun = iter(DataLoader(Noisy(), 4, num_workers=workers))
    run = Run(DataLoader(Samples(), 4))
    run.position = 0
    assert len(list(begun)) == 10
    assert not run.loads.state()["same"]


class Torn(Samples):
    """Has one sample that cannot be read, and whoever asks for it knows that."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 21:
            raise OSError
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_told_of() -> None:
    run = Run(DataLoader(Torn(), 4))
    run.position, batches = 0, iter(run.loader)
    for at in range(10):
        with pytest.raises(OSError) if at == 5 else contextlib.nullcontext():
            next(batches)
    assert not run.loads.state()["same"]


_CHANGING = [Noisy, Counting, Varying, Within, Seldom, Numbers, OfFile, Slotted, OfClass, Transformed]


@pytest.mark.parametrize("data", _CHANGING)
@pytest.mark.parametrize("workers", [0, 1])
def test_loading_that_changes_something_is_told_of(data: type[Samples], workers: int) -> None:
    run = Run(DataLoader(data(), 4, num_workers=workers))
    run.steps(8, lambda *_: None)
    assert not run.states[-1]["same"]


def _collators() -> list[Any]:
    drawn, counts = np.random.default_rng(1), [0]

    def draws(samples: Any) -> Any:
        return {"x": torch.tensor(drawn.random(2))}

    def draws_by(samples: Any, generator: Any) -> Any:
        return {"x": torch.tensor(generator.random(2))}

    class Foreign:
        def collate(self, samples: Any) -> Any:
            counts[0] += 1
            return {"x": torch.tensor(counts)}

    return [draws, functools.partial(draws_by, generator=np.random.default_rng(2)), Foreign().collate]


@pytest.mark.parametrize("collate", _collators(), ids=["closure", "partial", "method"])
def test_what_makes_batches_may_change_something_too(collate: Any) -> None:
    run = Run(DataLoader(Samples(), 4, collate_fn=collate))
    run.steps(8, lambda *_: None)
    assert not run.states[-1]["same"]


@pytest.mark.parametrize("workers", [1, 2])
def test_indices_are_drawn_when_they_were(workers: int) -> None:
    """By a sampler that goes by how many steps were done when it is asked."""

    def run() -> Run:
        made: list[Run] = []

        class Sampler:
            def __iter__(self) -> Any:
                return ((made[0].position if made else -1) + 1 for _ in range(30))

            def __len__(self) -> int:
                return 30

        loader = DataLoader(Samples(), 1, sampler=Sampler(), num_workers=workers)  # type: ignore[arg-type]
        made.append(Run(loader))
        return made[0]

    seen: dict[int, Any] = {}
    predecessor = run()
    predecessor.steps(20, lambda step, batch: seen.__setitem__(step, _read(batch)))
    newcomer = run()
    given = newcomer.steps(20, lambda *_: None, 12, predecessor.states[11], keeps=False)
    assert newcomer.left_out > 0
    assert [_read(batch) for batch in given[12:]] == [seen[step] for step in range(12, 20)]


def test_a_sampler_that_begins_anew_by_itself() -> None:
    """It raises StopIteration once an epoch, and goes on then."""

    class Batches:
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> list[int]:
            if self.at >= 3:
                self.at = 0
                raise StopIteration
            self.at += 1
            return [self.at]

        def __len__(self) -> int:
            return 3

    newcomer = Run(DataLoader(Samples(), batch_sampler=Batches()))  # type: ignore[arg-type]
    newcomer.position = 0
    newcomer.loads.follow({"same": True, "newest": []}, 100)
    for _ in range(3):
        assert len(list(newcomer.loader)) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_a_loader_that_has_ended_is_what_it_was(workers: int) -> None:
    class OfEpoch(Samples):
        epoch = 0

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"y": torch.tensor(index + self.epoch)}

    newcomer = Run(DataLoader(data := OfEpoch(), 4, num_workers=workers))
    newcomer.position = 0
    newcomer.loads.follow({"same": True, "newest": []}, 100)
    (*_, last) = iter(newcomer.loader)
    data.epoch = 1
    assert last["y"].tolist() == [36, 37, 38, 39]


@pytest.mark.parametrize("noted", [None, {"same": False, "newest": []}])
def test_all_is_loaded_where_nobody_knows_better(noted: dict[str, Any] | None) -> None:
    newcomer = Run(DataLoader(Samples(), 4))
    newcomer.position = 0
    newcomer.loads.follow(noted, 8)
    assert not any(isinstance(batch["x"], Unread) for batch in newcomer.loader)
    assert not newcomer.loads.state()["same"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(40.0))


def test_a_stream_is_read() -> None:
    run = Run(DataLoader(Stream(), 4))
    run.position = 0
    run.loads.follow({"same": True, "newest": []}, 8)
    assert not any(isinstance(batch, Unread) for batch in run.loader)


class ReadOn(Samples):
    """From something that nobody sees."""

    def __init__(self) -> None:
        self.hidden = mmap.mmap(-1, 1000)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.hidden.read_byte()
        return {"x": torch.tensor([self.hidden.tell()])}


def test_what_is_read_on_unseen_shows_at_the_end() -> None:
    predecessor = Run(DataLoader(ReadOn(), 4))
    predecessor.steps(8, lambda *_: None)
    newcomer = Run(DataLoader(ReadOn(), 4))
    newcomer.position = 0
    newcomer.loads.follow(predecessor.states[5], 6)
    for _ in newcomer.loader:
        newcomer.position += 1
        if newcomer.position == 6:
            assert newcomer.loads.lead() == OTHERS
            break
    else:
        pytest.fail("it has not come there")


def _unread(**tensors: torch.Tensor) -> tuple[dict[str, Any], UnreadBatch]:
    batch = UnreadBatch(lambda: {name: tensor.clone() for name, tensor in tensors.items()})
    return Structure(tensors).unread(batch), batch


def test_what_is_moved_cast_or_cut_is_not_read() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    made, batch = _unread(x=x)
    parts = [
        made["x"].to("cpu", non_blocking=True),
        made["x"].long()[:, 1:].contiguous(),
        made["x"].double().clone().detach(),
    ]
    assert not made["x"].requires_grad and made["x"].grad_fn is None and {made["x"]: 1}
    assert all(isinstance(part, Unread) for part in parts) and not batch.is_read
    cut = [made["x"].long()[0], made["x"].to("cpu", torch.int64)[1]]
    assert torch.tensor([number[0] for number in cut]).dtype == torch.int64
    parts[0], batch = (made := _unread(x=x)[0])["x"].to("cpu"), made["x"].ft_batch
    parts[1:] = [made["x"].long()[:, 1:].contiguous(), made["x"].double().clone().detach()]
    assert not batch.is_read and made["x"][[0, 1]].shape == (2, 4) and batch.is_read
    assert torch.equal(parts[1] + 0, x.long()[:, 1:]) and batch.is_read
    assert torch.equal(parts[2] + 0, x.double())


def test_whoever_changes_it_changes_what_was_made_of_it_before_as_ever() -> None:
    x = torch.zeros(4)
    made, _ = _unread(x=x)
    view, copied = made["x"][1:], made["x"].clone()
    made["x"][2] = 7
    made["x"].add_(1)
    assert view.tolist() == [1, 8, 1] and copied.tolist() == [0] * 4 and x.tolist() == [0] * 4


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.shape,
        lambda x: x.dtype,
        lambda x: len(x),
        lambda x: x.sum().item(),
        lambda x: np.asarray(x).tolist(),
        lambda x: [float(row[0]) for row in x],
        lambda x: torch.stack([x, x]).tolist(),
        lambda x: torch.nn.functional.linear(x, torch.ones(1, 4)).tolist(),
        lambda x: Squares.apply(x).tolist(),
        lambda x: pickle.loads(pickle.dumps(x)).tolist(),
        lambda x: copy.deepcopy(x).tolist(),
        lambda x: x[torch.tensor([True, False, True])].tolist(),
        lambda x: torch.ops.aten.mul.Tensor(x, x).tolist(),
        lambda x: torch.zeros(3, 4).copy_(x).tolist(),
        lambda x: x.data_ptr() != 0 and x.is_contiguous(),
        lambda x: repr(x),
        lambda x: x.take(torch.tensor([1])).tolist(),
    ],
)
def test_whatever_looks_reads(look: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    made, batch = _unread(x=x)
    assert look(made["x"]) == look(x)
    assert batch.is_read


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Encoding(UserDict[str, Any]):
    """As tokenizers make it."""

    def __init__(self, data: Any, extra: Any = None) -> None:
        super().__init__(data)
        self.extra = extra


def test_structures() -> None:
    x = torch.zeros(2)
    assert Structure([x, (x, {"a": x})]).is_known
    for other in ({}, {"a": x, "name": ["b"]}, {"a": 1}, Encoding({"a": x}, extra=object())):
        assert not Structure(other).is_known
    structure = Structure(Encoding({"a": x}))
    assert structure.fits(Encoding({"a": torch.ones(7)}))
    for other in (Encoding({"b": x}), {"a": x}, Encoding({"a": x}, extra=1), Encoding({"a": "x"})):
        assert not structure.fits(other)
    made = structure.unread(UnreadBatch(lambda: Encoding({"a": torch.ones(3)})))
    assert type(made) is Encoding and made.extra is None and made["a"].sum() == 3

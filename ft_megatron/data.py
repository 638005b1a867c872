"""Data iterators that can go back to where a step began, and forward to where a predecessor was.

Megatron builds its loaders before training, from the number of samples consumed, and draws from them as it
goes. A recovery needs their position at the version that training goes on from: a survivor has drawn too
much, a newcomer nothing. So a loader here is opened when it is first drawn from, at the position of that
moment, and what was drawn in the newest steps is kept, as many as may be done again.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ft_core.errors import ConfigError
from ft_megatron.deal import Dealer

Build = Callable[[Any, int], Any]
"""`build_pretraining_data_loader`: (data set, samples consumed) -> loader, None without a data set."""


class Loader:
    """In place of a `DataLoader`: the same batches, from a position that can be set.

    A position is `[samples consumed when the loader was made, batches drawn since]`.
    """

    def __init__(self, build: Build, dataset: Any, consumed: int) -> None:
        self._build, self._dataset = build, dataset
        self._base = consumed
        self._batches: Iterator[Any] | None = None
        self._exhausted = False
        self._began = False
        """Whether an iteration was begun since the last draw, which changes the random state."""
        self._drawn = 0
        self._kept: list[tuple[Any, torch.Tensor | None]] = []
        """Batches from `_kept_from` on, and the random state after a draw that changed it."""
        self._kept_from = 0
        self._marks: deque[int] = deque([0])
        """Where the newest steps have ended."""

    def __len__(self) -> int:
        return len(self._build(self._dataset, self._base))

    def __iter__(self) -> Loader:
        if self._exhausted or (self._batches is None and self._drawn == 0):
            self._open()
            self._began = True
        return self

    def __next__(self) -> Any:
        index = self._drawn - self._kept_from
        if index == len(self._kept):
            self._kept.append(self._draw())
        batch, after = self._kept[index]
        if after is not None:
            torch.set_rng_state(after)
        self._drawn += 1
        return batch

    def mark(self, keep: int = 2) -> list[int]:
        """A step is complete: the position where the next one begins. `keep`: of how many steps' ends the
        newest are, from where the batches since are kept."""
        self._marks.append(self._drawn)
        while len(self._marks) > keep:
            self._marks.popleft()
        if (keep_from := self._marks[0]) > self._kept_from:
            del self._kept[: keep_from - self._kept_from]
            self._kept_from = keep_from
        return [self._base, self._drawn]

    def seek(self, position: list[int]) -> None:
        """Go to a position that `mark` has returned, here or in a predecessor."""
        base, drawn = position
        if base != self._base or not self._kept_from <= drawn <= self._kept_from + len(self._kept):
            self._base, self._kept, self._kept_from = base, [], drawn
            self._batches = None
        self._drawn, self._marks = drawn, deque([drawn])

    def close(self) -> None:
        """End the loader's processes."""
        self._batches = None

    def _draw(self) -> tuple[Any, torch.Tensor | None]:
        before = torch.get_rng_state()
        if self._batches is None:
            self._open()
            torch.set_rng_state(before)
        assert self._batches is not None
        try:
            batch = _own(next(self._batches))
        except StopIteration:
            self._exhausted = True
            raise
        after = torch.get_rng_state()
        changed = self._began or not torch.equal(before, after)
        self._began = False
        return batch, after if changed else None

    def _open(self) -> None:
        """Begin an iteration at this position."""
        self._exhausted = False
        loader = self._build(self._dataset, self._base)
        skipped = 0
        if self._drawn:
            sampler = getattr(loader, "batch_sampler", None)
            width = getattr(sampler, "micro_batch_times_data_parallel_size", 0)
            width *= getattr(sampler, "num_micro_batches", 1)  # drawn at once (--hybrid-context-parallel)
            if width:
                loader = self._build(self._dataset, self._base + self._drawn * width)
            else:  # of the user's own, or one that is always read to its end
                skipped = self._drawn % len(loader) if hasattr(loader, "__len__") else self._drawn
        self._batches = iter(loader)
        for _ in range(skipped):
            next(self._batches)


def _own(batch: Any) -> Any:
    """The batch, in this process's own memory: what another has sent keeps a file open for each tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.clone() if batch.device.type == "cpu" and batch.is_shared() else batch
    if type(batch) is dict:
        return {key: _own(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_own(value) for value in batch)
    return batch


class DealtLoader:
    """The training data's loader where replica groups may leave: it reads what it is dealt.

    While all groups are there, that is what Megatron's own loader reads, worker processes and all.
    """

    def __init__(self, build: Build, dataset: Any, consumed: int) -> None:
        """Raises ConfigError for a loader whose samples cannot be dealt."""
        self._build, self._dataset = build, dataset
        self.first = consumed
        self._loader = build(dataset, consumed)
        sampler = getattr(self._loader, "batch_sampler", None)
        self._width = getattr(sampler, "micro_batch_times_data_parallel_size", 0)
        if type(sampler).__name__ != "MegatronPretrainingSampler":
            raise ConfigError(
                "--ft-policy shrink deals the samples of groups that left to the others, in the order of "
                "the data: give --dataloader-type single, or another policy"
            )
        self.turn = int(sampler.micro_batch_size)  # type: ignore[union-attr]
        self._offset = int(sampler.data_parallel_rank) * self.turn  # type: ignore[union-attr]
        self.dealer: Dealer | None = None
        self._batches: Iterator[Any] | None = None
        self._next = -1
        """The first sample of the batch that `_batches` gives next."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> DealtLoader:
        self._open(self.first)
        return self

    def __next__(self) -> Any:
        assert self.dealer is not None, "training has begun"
        dealt = self.dealer.take()
        if dealt[-1] >= len(self._dataset):
            raise StopIteration
        state = torch.get_rng_state()
        if dealt[0] != self._next and self.dealer.all_are_there:
            self._loader = self._build(self._dataset, dealt[0] - self._offset)
            self._open(dealt[0] - self._offset)
        if dealt[0] == self._next and dealt[-1] - dealt[0] == self.turn - 1:
            assert self._batches is not None
            batch = next(self._batches)
            self._next += self._width
        else:
            batch = self._loader.collate_fn([self._dataset[at] for at in dealt])
        torch.set_rng_state(state)
        if not self.dealer.contributes and isinstance(batch, dict) and "loss_mask" in batch:
            batch = {
                **batch,
                "loss_mask": torch.zeros_like(batch["loss_mask"]),
            }  # nor does it count in the log
        return batch

    def first_batch(self) -> Any:
        """A batch like those to come, which counts nowhere."""
        return self._loader.collate_fn([self._dataset[at] for at in range(self.turn)])

    def mark(self, keep: int = 2) -> list[int]:
        """The dealer knows where this is."""
        return []

    def seek(self, position: list[int]) -> None:
        """Go on from a position that `mark` has given."""

    def close(self) -> None:
        """End the loader's processes."""
        self._batches = self._loader = None  # which keeps them for its next iteration

    def _open(self, first: int) -> None:
        self._batches, self._next = iter(self._loader), first + self._offset


class Loaders:
    """All loaders of this role, in the order in which they were made."""

    def __init__(self) -> None:
        self._loaders: list[Loader | DealtLoader] = []
        self.keep = 2
        """Steps' ends, from the newest back, to which a recovery may go."""

    @property
    def dealt(self) -> list[DealtLoader]:
        """Those of the training data that wait for a dealer."""
        return [loader for loader in self._loaders if isinstance(loader, DealtLoader)]

    def wrap(self, build: Build, enabled: Callable[[], bool], elastic: Callable[[Any], bool]) -> Build:
        """`build_pretraining_data_loader`, making loaders of this kind where that is `enabled`.

        `elastic`: whether a data set's samples are to be dealt.
        """

        def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
            if dataset is None or not enabled():
                return build(dataset, consumed_samples)
            kind = DealtLoader if elastic(dataset) else Loader
            loader = kind(build, dataset, consumed_samples)
            if not self._loaders:
                atexit.register(self._close)
            self._loaders.append(loader)
            return loader

        return build_pretraining_data_loader

    def _close(self) -> None:
        """The script is done. What it has of the loaders does not live as long as what is here, and processes
        that are left are waited for; with `--exit-signal-handler` they take no SIGTERM."""
        for loader in self._loaders:
            loader.close()

    def mark(self) -> list[list[int]]:
        """Positions of all, at the end of a step."""
        return [loader.mark(self.keep) for loader in self._loaders]

    def seek(self, positions: list[list[int]]) -> None:
        """Set all to what `mark` has returned."""
        for loader, position in zip(self._loaders, positions, strict=True):
            loader.seek(position)

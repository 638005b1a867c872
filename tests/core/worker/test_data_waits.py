"""What a script waits for its loader is measured, whatever the loader is like."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ft_core.patched import NEXT_BATCH
from ft_core.worker.data_waits import DataWaits

TAKES = 0.05
"""Seconds, for each sample."""


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        time.sleep(TAKES)
        return index


class Nested(IterableDataset[int]):
    """Reads from another loader."""

    def __iter__(self) -> Iterator[int]:
        yield from (int(batch[0]) for batch in DataLoader(Slow()))


@pytest.fixture
def waits() -> Iterator[DataWaits]:
    found = DataWaits()
    with NEXT_BATCH.replaced(found._measured(NEXT_BATCH.original())):
        yield found


@pytest.mark.parametrize("processes", [0, 1])
def test_what_is_waited_for_a_loader(waits: DataWaits, processes: int) -> None:
    loader = DataLoader(Slow(), num_workers=processes)
    assert [int(batch) for batch in loader] == [0, 1, 2]
    assert waits.take() >= 3 * TAKES * 1e9
    assert waits.take() == 0


def test_a_loader_that_reads_from_another_is_waited_for_once(waits: DataWaits) -> None:
    began = time.monotonic_ns()
    assert [int(batch) for batch in DataLoader(Nested(), batch_size=None)] == [0, 1, 2]
    assert 3 * TAKES * 1e9 <= waits.take() <= time.monotonic_ns() - began


def test_what_is_read_ahead_by_another_thread_keeps_nobody_waiting(waits: DataWaits) -> None:
    read: list[int] = []
    thread = threading.Thread(target=lambda: read.extend(int(batch) for batch in DataLoader(Slow())))
    thread.start()
    thread.join()
    assert read == [0, 1, 2] and waits.take() == 0


def test_an_error_of_the_loader_is_the_scripts(waits: DataWaits) -> None:
    class Broken(Slow):
        def __getitem__(self, index: int) -> int:
            raise ValueError("no such sample")

    with pytest.raises(ValueError, match="no such sample"):
        next(iter(DataLoader(Broken())))
    assert waits.take() > 0
    assert [int(batch) for batch in DataLoader(Slow())] == [0, 1, 2]
    assert waits.take() >= 3 * TAKES * 1e9

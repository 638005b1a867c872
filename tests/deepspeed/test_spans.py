"""Bytes of storages: which of them are overwritten."""

from __future__ import annotations

import random

import pytest

from ft_deepspeed.spans import Bytes, Span


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_added_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    bytes_, known = Bytes(), set[tuple[int, int]]()
    for _ in range(60):
        storage, start = rng.randrange(2), rng.randrange(100)
        stop = start + rng.randrange(12)
        bytes_.add(Span(storage, start, stop, True))
        known |= {(storage, at) for at in range(start, stop)}
        for _ in range(20):
            start = rng.randrange(100)
            asked = Span(rng.randrange(3), start, start + rng.randrange(12), True)
            wanted = all((asked.storage, at) in known for at in range(asked.start, asked.stop))
            assert bytes_.covers(asked) == wanted, asked

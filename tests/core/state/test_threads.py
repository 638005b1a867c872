from __future__ import annotations

import os
import threading

import pytest

from ft_core.errors import CorruptSnapshot
from ft_core.state import threads


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (8, 4), (64, 8)])
def test_work_is_done_once_by_whichever_thread_is_free(monkeypatch, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    done, who, together = [], set(), threading.Barrier(expected)

    def do(number):
        if number < together.parties:
            together.wait(60)
        who.add(threading.current_thread())
        done.append(number)

    threads.each(100, do)
    assert sorted(done) == list(range(100)) and len(who) == together.parties
    threads.each(0, do)


def test_work_that_fails_ends_the_rest():
    done = []

    def do(number):
        if number == 5:
            raise CorruptSnapshot("5")
        done.append(number)

    with pytest.raises(CorruptSnapshot, match="5"):
        threads.each(10**9, do)
    assert 5 not in done

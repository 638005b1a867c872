"""Python's garbage collector stands still while others wait, and then goes on as the script has it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ft_core.process.collector import LONGEST, QUIET, Pause, WhenQuiet


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    gc.enable()


def test_a_pause_that_begins_twice_ends_once():
    pause = Pause()
    pause.end()
    assert gc.isenabled()
    pause.begin()
    pause.begin()
    assert not gc.isenabled()
    pause.end()
    assert gc.isenabled()


def test_a_script_that_collects_by_itself_goes_on_to_do_so():
    gc.disable()
    pause = Pause()
    pause.begin()
    pause.end()
    assert not gc.isenabled()


def test_garbage_waits_until_nothing_has_happened_for_a_while() -> None:
    quiet, ring = WhenQuiet(), [[]]
    collected: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:  # others come by themselves
            collected.append(2)

    gc.callbacks.append(count)
    try:
        quiet.tick(True, 1.0)
        assert not gc.isenabled()
        ring[0].append(ring)
        ring = [[]]
        quiet.tick(False, 2.0)
        quiet.tick(True, 3.0)
        quiet.tick(False, 4.0)
        quiet.tick(False, 4.0 + QUIET - 0.1)
        assert not gc.isenabled() and not collected
        quiet.tick(False, 4.0 + QUIET)
        assert gc.isenabled() and collected == [2, 2] and gc.get_freeze_count()
        quiet.tick(False, 1000.0)
        assert collected == [2, 2], "once"
        quiet.tick(True, 2000.0)
        quiet.tick(True, 2000.0 + LONGEST)
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(count)
        gc.unfreeze()

"""Python's garbage collector stands still while others wait, and then goes on as the script has it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ft_core.process.collector import Pause


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

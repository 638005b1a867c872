"""Of all tests: which layer each is in, and what is left out when time is up."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from layers import CHAOS, COLLECTED, is_quick

UNTIL = "FT_TESTS_UNTIL"
"""A time in seconds since 1970 (`date +%s`) after which no `long` test begins."""
LEFT_OUT = f"left out: it is later than {UNTIL} says"

with contextlib.suppress(ModuleNotFoundError):  # the environment of megatron.training is without it
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # 200 ms otherwise: machines stall for longer
    settings.load_profile("any machine")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, the path of which has 107 bytes at most: `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="ft-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Garbage is collected again after a test that has left a session in the middle of a recovery."""
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def own_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What threads say that an earlier test has left, a minute later maybe, is none of this test's."""
    others = set(threading.enumerate()) - {threading.current_thread()}

    def own(_: logging.LogRecord) -> bool:
        return threading.current_thread() not in others

    caplog.handler.addFilter(own)
    yield
    caplog.handler.removeFilter(own)


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = config.stash[COLLECTED] = set()
    for item in items:
        if item.path.parent == CHAOS and not item.get_closest_marker("exhaustive"):
            test = f"{item.path.name}::{item.name}"
            found.add(test)
            if not is_quick(test):
                item.add_marker("long")


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    files = Counter(r.nodeid.partition("::")[0] for r in skipped if LEFT_OUT in r.longreprtext)
    if files:
        terminalreporter.section("left out for want of time")
        for file, count in files.items():
            terminalreporter.line(f"left out: {count} tests of {file}")
        terminalreporter.line(f"left out: {files.total()} tests in all; `make test-rest` runs them")

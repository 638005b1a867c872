"""What a newcomer sees of its predecessors, which may be gone between two looks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_core.node.workers import orphans
from ft_core.process.signals import catches
from ft_core.worker import predecessor_cleanup


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One whose name is no text."""
    named = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xffname', 0, 0, 0); print(flush=True)"
    found = subprocess.Popen([sys.executable, "-c", f"{named}; time.sleep(600)"], stdout=subprocess.PIPE)
    assert found.stdout is not None and found.stdout.readline()
    yield found
    found.kill()
    found.wait()
    found.stdout.close()


@pytest.mark.parametrize("look", ["is_dir", "iterdir"])
def test_one_that_is_gone_between_two_looks(
    look: str, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not predecessor_cleanup.has_chosen_port(process.pid)
    real = getattr(Path, look)

    def goes(path: Path) -> Any:
        found = real(path)
        process.kill()
        process.wait()
        return found

    monkeypatch.setattr(Path, look, goes)
    assert predecessor_cleanup.has_chosen_port(process.pid), "it may: that it is gone is for others to see"
    assert predecessor_cleanup.wait(0, [process.pid], to_the_end=True)


def test_names_that_are_no_text(process: subprocess.Popen[bytes]) -> None:
    assert process.pid in orphans._children(os.getpid())
    assert not catches(process.pid, 15)

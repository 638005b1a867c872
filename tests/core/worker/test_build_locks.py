"""Locks under which torch builds extensions, and whose owners are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_BEGIN = """
import contextlib, sys
from ft_core.worker import build_locks
build_locks.install(contextlib.nullcontext)
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
"""
_HOLDS = _BEGIN + "assert baton.try_acquire(); print(flush=True); sys.stdin.read(); baton.release()"
_WAITS = _BEGIN + "assert not baton.try_acquire(); print(flush=True); baton.wait()"


def start(script: str, lock: Path) -> subprocess.Popen[bytes]:
    """It has said that it has come to the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    return process


def test_the_lock_of_a_process_that_was_killed_is_taken_away(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with start(_HOLDS, lock) as owner, start(_WAITS, lock) as waits:
        assert waits.poll() is None
        owner.kill()
        assert waits.wait(60) == 0
    assert os.listdir(tmp_path) == []
    with start(_HOLDS, lock) as owner:  # and the next one has it
        owner.communicate()
        assert owner.returncode == 0
    assert os.listdir(tmp_path) == []


def test_a_lock_of_somebody_who_lives_or_is_unknown_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with start(_HOLDS, lock) as owner, start(_WAITS, lock) as waits:
        held = lock.read_text()
        assert waits.poll() is None and lock.read_text() == held
        owner.communicate()
        assert waits.wait(60) == 0
    lock.write_text("")
    with start(_WAITS, lock) as waits:
        assert waits.poll() is None and lock.exists()
        lock.write_text(f"another-machine {os.getpid()} 1")
        assert waits.poll() is None and lock.exists()
        lock.unlink()
        assert waits.wait(60) == 0

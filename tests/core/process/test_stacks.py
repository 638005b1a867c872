"""Where a process is, seen from outside, whether it can help or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for_value

from ft_core.node.workers.orphans import child
from ft_core.process import stacks

SCRIPT = """
import ctypes, sys
from pathlib import Path
from ft_core.process import stacks
stacks.register(Path(sys.argv[1]))

def with_the_lock():
    while True:  # a signal wakes it
        ctypes.PyDLL(None).sleep(600)

def without():
    import time
    time.sleep(600)

print("there", flush=True)
{"lock": with_the_lock, "free": without}[sys.argv[2]]()
"""


def started(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    wait_for_value(lambda: _state(process.pid), "S")
    return process


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(("how", "name"), [("lock", "with_the_lock"), ("free", "without")])
def test_the_stack_of_a_process_that_does_not_help(how: str, name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")  # no py-spy
    monkeypatch.setattr(stacks, "_ANSWER", 60.0)
    process = started(tmp_path, how)
    try:
        target = tmp_path / "hangs" / "role-0.txt"
        said = stacks.write(process.pid, tmp_path, target, child)
        assert f"in {name}" in said and str(target) in said
        assert f"in {name}" in target.read_text() and "State:" in target.read_text()
        assert f"in {name}" in stacks.write(process.pid, tmp_path, target, child), "again"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_process_has_none(tmp_path: Path) -> None:
    process = started(tmp_path, "free")
    try:
        os.kill(process.pid, signal.SIGSTOP)
        wait_for_value(lambda: _state(process.pid), "T")
        target = tmp_path / "role-0.txt"
        assert "a stopped process does not tell its stack" in stacks.write(
            process.pid, tmp_path, target, child
        )
        assert "State:\tT" in target.read_text()
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_would_die_of_the_signal_does_not_get_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    (tmp_path / stacks.NAME).touch()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert "its stack cannot be had" in stacks.write(
            process.pid, tmp_path, tmp_path / "role-0.txt", child
        )
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()

"""Trainings in which what is listed happens, one after the other: rows of the table of errors."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import Training, environment

CHAOS = Path(__file__).parent / "chaos"
SCRIPTS = {
    "pretrain_gpt_core.py": "failing_core.py",
    "pretrain_clm.py": "failing_clm.py",
    "pretrain_gpt.py": "failing_pretrain.py",
}
"""A recipe, and the script that runs it."""
CGROUPS = Path("/sys/fs/cgroup")
_LITTLE = 128 << 20
"""Bytes of memory that a worker has in its own cgroup, before the kernel ends it."""


@dataclass(frozen=True)
class Failing:
    """A training in which something happens, in the order of the list: (role, point, step, what).

    `what`: a row of the table, or a line of Python. Each happens once, and after the one before it.
    """

    training: Training
    failures: tuple[tuple[int, str, int, str], ...]
    cgroup: Path | None = None

    @property
    def world(self) -> int:
        return self.training.world

    @property
    def script(self) -> Path:
        return CHAOS / SCRIPTS[self.training.script.name]

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return self.training.arguments(iterations, protected)

    def environment(self) -> dict[str, str]:
        found = self.training.environment() | {"FT_TEST_FAILURES": json.dumps(self.failures)}
        paths = [str(CHAOS.parent), found.get("PYTHONPATH", environment()["PYTHONPATH"])]
        return found | {"PYTHONPATH": ":".join(paths), "FT_TEST_CGROUP": str(self.cgroup or "")}


@contextlib.contextmanager
def little_memory() -> Iterator[Path | None]:
    """A cgroup in which a process soon meets the kernel's OOM killer; None where none can be made."""
    v1 = (CGROUPS / "memory").is_dir()
    path = (CGROUPS / "memory" if v1 else CGROUPS) / f"ft-test-{os.getpid()}"
    names = ("memory.limit_in_bytes", "memory.swappiness") if v1 else ("memory.max", "memory.swap.max")
    try:
        path.mkdir()
        for name, value in zip(names, (_LITTLE, 0), strict=True):
            (path / name).write_text(str(value))
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        yield None
        return
    try:
        yield path
    finally:
        end = time.monotonic() + 10
        while path.exists():
            with contextlib.suppress(OSError):  # while somebody is in it
                path.rmdir()
            assert time.monotonic() < end, f"{path}: {(path / 'cgroup.procs').read_text()}"

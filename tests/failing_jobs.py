"""Whole jobs in which the errors of the table in docs/failure_model.md happen, to one role of many."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from failures import CASES, NODE, STEP, TABLE, Killed, Own, Row, Script
from harness import Job, Result, Training, check_clean, check_survivors, environment

from ft_core.cli import ask

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


# -- what restarts ---------------------------------------------------------------------------------

TROUBLED = 1
"""The role that it all happens to."""
_ORDERED = next(error for error, case in CASES.items() if isinstance(case, Killed) and case.ordered)
_OOM = next(error for error, case in CASES.items() if isinstance(case, Killed) and case.out_of_memory)
WAIT = "import failing; failing.wait_for_the_end()"
"""Others wait as well, until a failure ends the epoch."""


def every_row_that_restarts(training: Training, directory: Path) -> tuple[Result, int, int]:
    """One after the other in one job, each taken for what the table says, and counted as it says.

    Returns what became of the job, its steps, and how often it has recovered.
    """
    rows = [row for row in TABLE if row.first == "restarts" and not isinstance(CASES.get(row.error), Own)]
    rows.sort(key=lambda row: row.error == NODE)
    with little_memory() as cgroup:
        if cgroup is None or not os.access("/dev/kmsg", os.R_OK):
            rows = [row for row in rows if row.error != _OOM]
        failures = _in_turn(rows)
        failing, steps = Failing(training, failures, cgroup), failures[-1][2] + 3
        with Job(directory / "job", failing, steps, spares=0, ftrun=("--respawn",)) as job:
            for number, row in enumerate(rows):
                job.until((job.job_dir / f"failure-{number}").exists, f"{number}: {row.error}", 150)
                if row.error == _ORDERED:
                    job.kill_worker(TROUBLED)
            with ask.line(job.job_dir) as found:
                [known] = found.nodes("nodes")
            job.kill_nodes(TROUBLED)
            result = job.finish()
    assert result.code == 0, result.output[-4000:]
    found = [(event["fault"], event["roles"]) for event in result.of("detected")]
    assert found == [(row.fault, [TROUBLED]) for row in rows]
    assert result.recoveries == len(rows)
    strikes = {node.node: len(node.strikes) for node in known.nodes}  # in the order in which they came
    assert strikes == {"node0": 0, f"node{TROUBLED}": _count(rows[:-1])}
    check_survivors(result, training.world)
    check_clean(result)
    return result, steps, len(rows)


def _in_turn(rows: list[Row]) -> tuple[tuple[int, str, int, str], ...]:
    """Each in a step of its own, but what happens in start-up, to the worker that has just taken over."""
    found: list[tuple[int, str, int, str]] = []
    step = 0
    for row in rows:
        case = CASES.get(row.error)
        if isinstance(case, Script) and case.step < 0:
            found.append((TROUBLED, "startup", 0, row.error))
        else:
            step += 1
            found.append((TROUBLED, "forward", step, WAIT if case is None else row.error))
    return tuple(found)


def _count(rows: list[Row]) -> int:
    """What counts against the node, by the table."""
    seen: Counter[str] = Counter()
    found = 0
    for row in rows:
        found += row.counts == "yes" or (row.counts == "from the second on" and seen[row.fault] > 0)
        seen[row.fault] += 1
    return found


# -- what ends the job -----------------------------------------------------------------------------

NEVER_AGAIN = ("--max-restarts=0",)
ENDING = [row for row in TABLE if row.first != "restarts" or row.again != "restarts"]


def check_it_ends_the_job(row: Row, training: Training, directory: Path) -> None:
    """At once or when it comes again, with the exit code that the table says, and a word of which role."""
    case, tries = CASES[row.error], 1 if row.first != "restarts" else 2
    startup = isinstance(case, Script) and case.step < 0
    point, step = ("startup", 0) if startup else ("forward", STEP)
    failing = Failing(training, tries * ((TROUBLED, point, step, row.error),))
    with Job(directory / "job", failing, 2 * STEP, spares=0, ftrun=NEVER_AGAIN) as job:
        result = job.finish()
    code = (row.first, row.again)[tries - 1].rpartition(" ")[2]
    assert result.code == int(code), result.output[-4000:]
    assert "ftrun: the job stops: worker" in result.output
    assert f"of role {TROUBLED} on node{TROUBLED}: exit code" in result.output
    assert result.recoveries == tries - 1
    check_clean(result)


# -- who leaves --------------------------------------------------------------------------------------

LEAVING = {
    "sys.exit(0)": ("import sys; sys.exit(0)", f"role {TROUBLED} came to the end of its script after step"),
    "os._exit(0)": ("import os; os._exit(0)", f"of role {TROUBLED} on node{TROUBLED}: exit code 0"),
}
"""What a role does that leaves the others waiting, and what is said of it."""
WHERE = [("begin", 0), ("startup", 0), ("evaluate", 2)]
EVALUATING = ("--eval-interval=2", "--eval-iters=1")


def check_nobody_waits_for_who_leaves(
    how: str, where: tuple[str, int], training: Training, directory: Path
) -> None:
    """The job ends, and says who has left."""
    text, said = LEAVING[how]
    failing = Failing(training, ((TROUBLED, *where, text),))
    with Job(directory / "job", failing, 6, spares=0, ftrun=NEVER_AGAIN) as job:
        result = job.finish()
    assert result.code == 1, result.output[-4000:]
    assert said in result.of("stopped")[0]["reason"]
    assert not result.recoveries
    check_clean(result)

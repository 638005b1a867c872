"""The console shows each warning once, and all else as it is; with `--ft-log-format json` objects."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import environment

from ft_core.process.lines import LOG_CONTEXT, LogContext, entry, is_entry
from ft_core.worker.console import Console
from ft_core.worker.logs import take_over

PYTHON = """/site/torch/nn/x.py:12: UserWarning: it is slow
  warnings.warn("it is slow")
"""
LONG = (
    "/site/y.py:5: UserWarning: \n        Use another one\n        \n        or none.\n  warnings.warn(msg)\n"
)
TORCH = "[W1123 13:04:05.123456789 Utils.hpp:164] Warning: deprecated (function f)\n"
TORCH_LATER = "[rank1]:[W1123 13:04:06.000000001 Utils.hpp:164] Warning: deprecated (function f)\n"
HF = "[transformers] `loss_type=None` was set in the config but it is unrecognized.\n"
LOGGER = "2026-11-23 13:04:05,123 WARNING megatron: no fused kernels\n"
LOGGER_LATER = "2026-11-23 13:04:07,321 WARNING megatron: no fused kernels\n"
DEEPSPEED = "[2026-11-23 13:04:05,123] [WARNING] [stage_1.py:12:f] it warns\n"
DEEPSPEED_LATER = "[2026-11-23 13:05:05,523] [WARNING] [stage_1.py:12:f] it warns\n"


def shown(console: Console, directory: Path, text: str, stream: int = 2) -> str:
    return console.dress(directory, stream, text.encode()).decode()


@pytest.fixture
def workers(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "logs" / f"n{number}-1{number}" / "worker-0" for number in range(3)]
    for directory in found:
        directory.mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (PYTHON, PYTHON),
        (LONG, LONG),
        (HF, HF),
        (TORCH, TORCH_LATER),
        (LOGGER, LOGGER_LATER),
        (DEEPSPEED, DEEPSPEED_LATER),
    ],
)
def test_a_warning_is_shown_once_on_all_nodes(workers: list[Path], first: str, again: str) -> None:
    here, there = Console(workers[0].parents[1]), Console(workers[0].parents[1])
    assert shown(here, workers[0], f"a\n{first}b\n") == f"a\n{first}b\n"
    for console, directory in ((here, workers[0]), (here, workers[1]), (there, workers[2])):
        assert shown(console, directory, f"a\n{again}b\n") == "a\nb\n"
    assert shown(there, workers[2], "  c\n") == "  c\n"


def test_a_warning_comes_in_two_pieces(workers: list[Path]) -> None:
    console = Console(workers[0].parents[1])
    shown(console, workers[0], PYTHON)
    head, rest = PYTHON.splitlines(keepends=True)
    assert shown(console, workers[1], head) == ""
    assert shown(console, workers[0], "  b\n") == "  b\n", "another worker's"
    assert shown(console, workers[1], f"{rest}b\n{rest}") == f"b\n{rest}"


@pytest.mark.parametrize(
    "line",
    [
        "iteration 3/100 | loss 10.4\n",
        "RuntimeError: the size of tensor a (3) must match the size of tensor b (4)\n",
        "2026-11-23 13:04:05,123 ft WARNING node n2: role 1: its copy is not replicated yet\n",
        "  indented\n",
        "\n",
    ],
)
def test_all_else_is_shown_as_often_as_it_comes(workers: list[Path], line: str) -> None:
    """Also what this engine warns of: it is about what happens now."""
    console = Console(workers[0].parents[1])
    for directory in (*workers, workers[0]):
        assert shown(console, directory, line) == line
        assert shown(console, directory, line, stream=1) == line


def test_warnings_that_differ_are_told_apart(workers: list[Path]) -> None:
    console = Console(workers[0].parents[1])
    for rank, directory in enumerate(workers):
        line = f"train.py:3: UserWarning: told by rank {rank}\n"
        assert shown(console, directory, line) == line


def test_whole_lines_are_not_put_behind_a_bar(workers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one terminal. Bars of several outputs are written over each other, as without this engine."""
    monkeypatch.setattr("ft_core.worker.console._places", lambda: {1: "terminal", 2: "terminal"})
    console, (one, other, _) = Console(workers[0].parents[1], "n"), workers
    assert shown(console, one, "\r  0%") == "[n]: \r[n]:   0%"
    assert shown(console, one, "\r 10%") == "\r[n]:  10%"
    assert shown(console, other, "\r  0%") == "[n]: \r[n]:   0%"
    assert shown(console, one, "a\n", stream=1) == "\n[n]: a\n"
    assert shown(console, one, "b\n", stream=1) == "[n]: b\n"
    assert shown(console, one, "\r 20%") == "\r[n]:  20%"
    assert shown(console, one, "\r100%\nc\n") == "\r[n]: 100%\n[n]: c\n"
    assert console.finish(one, 2) == console.finish(other, 2) == b""


def test_what_goes_elsewhere_ends_no_line(workers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_core.worker.console._places", lambda: {1: "file", 2: "terminal"})
    console = Console(workers[0].parents[1])
    assert shown(console, workers[0], "\r  0%") + shown(console, workers[0], "a\n", stream=1) == "\r  0%a\n"
    assert console.finish(workers[0], 1) + console.finish(workers[0], 2) == b"\n"


def test_what_belongs_to_a_warning_that_was_shown_comes_in_pieces(workers: list[Path]) -> None:
    console = Console(workers[0].parents[1])
    shown(console, workers[0], PYTHON)
    head, rest = PYTHON.splitlines(keepends=True)
    assert shown(console, workers[1], head + rest[:5]) + shown(console, workers[1], rest[5:]) == ""
    assert shown(console, workers[1], "b\n") == "b\n"


def test_a_directory_that_cannot_be_written_costs_repetitions_only(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a directory")
    here, there = Console(tmp_path / "logs"), Console(tmp_path / "logs")
    assert [shown(each, tmp_path / "w", PYTHON) for each in (here, here, there)] == [PYTHON, "", PYTHON]


def test_objects(workers: list[Path]) -> None:
    """What the engine has logged passes as it is; a line of the script's gets what is known of it."""
    own = entry(0.0, "WARNING", "worker", {"role": 1}, "a\nb")
    about = {"time": "1970-01-01T00:00:00.000Z", "level": "WARNING", "component": "worker"}
    assert json.loads(own) == {**about, "role": 1, "message": "a\nb"}
    console = Console(workers[1].parents[1], "n1", json=True)
    take_over(workers[1], 3, 0)
    text = shown(console, workers[1], f'{own}\n{{"loss": 1}}\n{PYTHON}{own}\n', stream=1)
    found = [json.loads(line) for line in text.splitlines()]
    assert [line for line in text.splitlines() if line == own] == [own, own]
    assert [each["message"] for each in found] == ["a\nb", '{"loss": 1}', *PYTHON.splitlines(), "a\nb"]
    assert [each["level"] for each in found[1:4]] == ["INFO", "WARNING", "INFO"]
    about = {"component": "script", "node": "n1", "role": 3, "stream": "stdout"}
    assert all(each.items() >= about.items() for each in found[1:4])


def test_of_a_worker_without_a_role_none_is_said(workers: list[Path]) -> None:
    console = Console(workers[0].parents[1], json=True)
    assert "role" not in json.loads(shown(console, workers[0], "a\n"))
    (workers[0] / "role").write_text("5\n")
    assert json.loads(shown(console, workers[0], "a\n"))["role"] == 5


@pytest.fixture
def voice(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogContext]:
    for name in ("json", "component", "about"):
        monkeypatch.setattr(LOG_CONTEXT, name, getattr(LOG_CONTEXT, name))
    LOG_CONTEXT.json, LOG_CONTEXT.component, LOG_CONTEXT.about = (
        True,
        "agent",
        lambda: {"node": "n1", "epoch": 2},
    )
    yield LOG_CONTEXT


def test_what_is_logged(voice: LogContext) -> None:
    try:
        raise ValueError("no\nthing")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("ft", logging.ERROR, "x.py", 1, "role %d fails", (3,), error)
    line = voice.record(record)
    assert is_entry(line) and "\n" not in line
    found = json.loads(line)
    assert found.items() >= {"level": "ERROR", "component": "agent", "node": "n1", "epoch": 2}.items()
    assert found["message"].startswith("role 3 fails\nTraceback") and found["message"].endswith("no\nthing")
    assert json.loads(voice.line("INFO", "ftrun: it goes on"))["message"] == "ftrun: it goes on"
    voice.json = False
    assert voice.line("INFO", "ftrun: it goes on") == "ftrun: it goes on"
    assert " ft ERROR role 3 fails\nTraceback" in voice.record(record)


SCRIPT = """
import logging, os, sys, time, warnings
from pathlib import Path
import torch

warnings.warn("a script's")
logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
logging.warning("a logger's")
print(f"[W1123 13:04:05.{time.time_ns() % 10**9:09} x.cpp:1] Warning: torch's", file=sys.stderr)
print("WARNING: a print's")
for step in range(3):
    warnings.warn("a step's", RuntimeWarning)
    print("rank", os.environ["RANK"], "step", step)
logging.getLogger("ft_core").warning("the engine's")
there = Path(sys.argv[1])
(there / os.environ["RANK"]).touch()
while len(list(there.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    sys.exit(int(sys.argv[2]))
"""
COMPONENTS = ("ftrun", "controller", "agent", "worker", "script")
KINDS = ("a script's", "a logger's", "torch's", "a print's", "a step's")


def job(tmp_path: Path, *flags: object, code: int) -> list[str]:
    """The console of one with four roles on two nodes, of which one ends with this code."""
    (tmp_path / "there").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", "--nnodes=2", "--nproc-per-node=2"]
    command += [*map(str, flags), str(tmp_path / "train.py"), str(tmp_path / "there"), str(code)]
    variables = {name: value for name, value in environment().items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        command,
        env=variables | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout
    return done.stdout.splitlines()


def test_a_whole_jobs_console(tmp_path: Path) -> None:
    """Of four roles each warning is shown once, and each line of theirs; the files have everything."""
    console = job(tmp_path, f"--job-dir={tmp_path / 'job'}", code=0)
    lines = [line for line in console if not line.startswith("ftrun: ")]  # that it takes long to start here
    assert {kind: sum(kind in line for line in lines) for kind in KINDS} == dict.fromkeys(KINDS, 1) | {
        "a script's": 2,  # with its line of source code
        "a step's": 2,
    }
    own = [line for line in lines if line.startswith("rank ")]
    assert sorted(own) == sorted(f"rank {rank} step {step}" for rank in range(4) for step in range(3))
    assert sum("ft WARNING the engine's" in line for line in lines) == 4
    assert len(lines) == 7 + 12 + 4, lines
    for role in range(4):
        files = (tmp_path / "job" / "logs" / f"role-{role}").glob("*.log")
        text = "".join(path.read_text() for path in files)
        assert all(kind in text for kind in KINDS)


def test_a_whole_jobs_console_as_objects(short_path: Path) -> None:
    """Of the launcher, the controller, the workers and the script."""
    console = job(short_path, "--ft-log-format=json", "--max-restarts=0", code=3)
    lines = [json.loads(line) for line in console]
    assert all(line.keys() >= {"time", "level", "component", "message"} for line in lines)
    by = {name: [line for line in lines if line["component"] == name] for name in COMPONENTS}
    assert sum(map(len, by.values())) == len(lines)
    assert by["ftrun"][0]["message"].startswith("ftrun: job directory ")
    [directory] = short_path.glob("ftjob-*")
    said = (directory / "logs" / "controller.log").read_text().splitlines()
    assert said == [line for line, found in zip(console, lines, strict=True) if found in by["controller"]]
    stops = by["controller"][-1]
    assert stops["level"] == "ERROR" and "the job stops" in stops["message"] and "epoch" in stops
    assert {line["role"] for line in by["worker"]} == {0, 1, 2, 3}
    assert all(line["message"] == "the engine's" and line["epoch"] == 1 for line in by["worker"])
    steps = [line for line in by["script"] if line["message"].startswith("rank ")]
    assert len(steps) == 12
    assert all(line["message"].startswith(f"rank {line['role']} ") for line in steps)
    assert {line["node"] for line in by["script"]} == {"node0", "node1"}


def test_local_ranks_that_are_shown(workers: list[Path]) -> None:
    """With two roles a node, 1 and 3 are the second ones; who has no role yet is shown."""
    console = Console(workers[0].parents[1], local_ranks=[1], per_node=2)
    assert shown(console, workers[0], "imports\n") == "imports\n"
    for role, directory in enumerate(workers, 1):
        take_over(directory, role, 0)
    assert [shown(console, directory, "a\n") for directory in workers] == ["a\n", "", "a\n"]

"""`python -m benchmarks.gpu` where there is no device: what it makes, says of the rest, and writes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROOT

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import page
from benchmarks.gpu.checks import Check, NotThereError, Row, read

MADE = {
    "software: msgspec": "pass",
    "software: adapters are found": "pass",
    "software: no thread of torch's ends a survivor": "pass",
    "consistency: state on the host: 50 steps": "pass",
    "nccl: gloo, 2 ranks on the host": "pass",
}
"""Checks that need no device."""


def test_without_a_device(tmp_path: Path) -> None:
    """Every row answers, what needs no device is made, and no figure is written."""
    out = tmp_path / "gpu.json"
    flags = ["--device=none", "--quick", f"--out={out}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert not out.exists()
    header, _, *lines = done.stdout.splitlines()
    check, result, figure = (header.index(word) for word in ("check", "result", "figure"))
    found = {
        f"{line[:check].strip()}: {line[check:result].strip()}": line[result:figure].strip() for line in lines
    }
    assert {name.partition(":")[0] for name in found} == set(command.LIMITS)
    assert {name: found[name] for name in MADE} == MADE
    for name, answer in found.items():
        if name.partition(":")[0] in ("snapshot", "job", "compiled", "zero"):
            assert answer == "no device", name
    assert "nothing is written" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("row", [row for row in command.LIMITS if row != "software"])
def test_the_same_code_on_the_host(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.LIMITS, row, 110)  # they are for a machine that does nothing else
    checks = command.run(row, "cpu", quick=True)
    assert {check.result for check in checks} & {"pass"}, checks
    assert not [check for check in checks if check.result == "fail"], checks


def test_a_row_that_hangs_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.LIMITS, "software", 0.0)
    assert command.run("software", "none", quick=True)[-1] == Check(
        "software", "ends", "fail", "not within 0.0 s"
    )


def test_a_row_that_crashes_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.LIMITS, "nowhere", 60)
    assert command.run("nowhere", "none", quick=True) == [Check("nowhere", "ends", "fail", "exit code 1")]


@pytest.mark.parametrize(("result", "code"), [("pass", 0), ("not there", 0), ("no device", 0), ("fail", 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, result: Any, code: int) -> None:
    monkeypatch.setattr(command, "run", lambda row, device, quick: [Check(row, "x", result)])
    assert command.main(["--device=none", "--only=job"]) == code


def test_what_is_told_before_a_crash_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "checks"
    row = Row("nccl", "none", True, out)
    row.tell("first", True, "5 ms", seconds=0.005)
    with row.checking("second"):
        raise ValueError("in it")
    with row.checking("third"):
        raise NotThereError("no apex")
    row.on_device("fourth", lambda: pytest.fail("there is none"))
    with out.open("a") as file:
        file.write('{"row": "nccl", "che')  # killed while it writes
    assert read(out) == [
        Check("nccl", "first", "pass", "5 ms", {"seconds": 0.005}),
        Check("nccl", "second", "fail", "ValueError: in it"),
        Check("nccl", "third", "not there", "no apex"),
        Check("nccl", "fourth", "no device"),
    ]


class Properties:
    name, total_memory = "NVIDIA Stand-in", 80 << 30


def test_a_run_of_some_rows_replaces_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    path = tmp_path / "gpu.json"
    all_rows = argparse.Namespace(only=None, quick=False)
    first = [Check("nccl", "2 ranks", "fail", "hang"), Check("software", "torch", "seen", "2.13")]
    command.write(path, first, {"nccl": 9.0, "software": 1.0}, all_rows)
    only = argparse.Namespace(only=["nccl"], quick=False)
    command.write(path, [Check("nccl", "2 ranks", "pass", "100 times | 5 ms")], {"nccl": 8.0}, only)
    found = json.loads(path.read_text())
    assert [(c["row"], c["result"]) for c in found["checks"]] == [("software", "seen"), ("nccl", "pass")]
    assert found["seconds"] == {"nccl": 8.0, "software": 1.0}
    written = page.section(path)
    assert "NVIDIA Stand-in (80.0 GiB)" in written and "NCCL 2.29.7" in written
    assert "| nccl | 2 ranks | pass | 100 times / 5 ms |" in written


def test_the_page_has_what_was_measured() -> None:
    """And nothing else: without a result it says that there is none."""
    text = page.PAGE.read_text()
    assert page.written(text, page.RESULT) == text


def test_all_rows_fit_into_a_command_on_a_lent_machine() -> None:
    assert sum(command.LIMITS.values()) < 600

"""Time lines: what a worker writes, and what `ftctl timeline` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_core.cli import ctl
from ft_core.cli import timeline as command
from ft_core.process.timeline import NAME, Timeline


def written(job_dir: Path, role: int, epoch: int, *phases: str, **facts: float) -> None:
    """A worker's line."""
    directory = job_dir / "logs" / "node0" / f"worker-{role}"
    directory.mkdir(parents=True, exist_ok=True)
    timeline = Timeline()
    timeline.begin(directory)
    for phase in phases:
        timeline.mark(phase)
    timeline.facts |= facts
    timeline.end(role, epoch)


def test_each_phase_ends_where_the_next_begins(tmp_path: Path) -> None:
    written(tmp_path, 3, 2, "forked", "model", "model", "step", passed=7)
    (line,) = command.read(tmp_path)
    assert (line.role, line.epoch, line.passed, line.state) == (3, 2, 7, 0)
    spans = line.spans()
    assert [name for name, _, _ in spans] == ["forked", "model", "step"]
    assert [end for _, _, end in spans] == [*(begin for _, begin, _ in spans[1:]), line.end]
    assert all(begin <= end for _, begin, end in spans)


def test_lines_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, 3, 2, "forked", "step")
    [file] = (tmp_path / "logs").glob(f"*/*/{NAME}")
    with file.open("a") as lines:
        lines.write('{"gar\n{"role": 3')
    assert [line.role for line in command.read(tmp_path)] == [3]


def test_rates_of_what_was_done_with_the_state() -> None:
    phases = [
        ("waiting for state", 1.0),
        ("loading", 3.0),
        ("verifying", 4.0),
        ("loading", 4.5),
        ("step", 5.5),
    ]
    line = command.Line(0, 2, phases, 9.0, state=2 * 10**9, fetch_s=4.0)
    assert line.rates() == {"fetched": 0.5, "verified": 4.0, "loaded": 2.0}
    assert command.Line(0, 2, phases, 9.0, state=10**9).rates() == {"verified": 2.0, "loaded": 1.0}
    assert command.Line(0, 2, [("loading", 3.0), ("step", 4.0)], 9.0, fetch_s=1.0).rates() == {}
    assert (
        "2.00 GB, fetched at 0.5 GB/s, verified at 4.0 GB/s, loaded at 2.0 GB/s" in command.shown([line])[2]
    )


def test_a_line_for_each_epoch_and_none_between(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.mark("before there is a file")
    timeline.begin(tmp_path)
    timeline.end(0, 1)
    assert not timeline.running and not (tmp_path / NAME).exists()
    for epoch in (1, 2):
        timeline.mark("loading")
        assert timeline.running
        timeline.end(0, epoch)
        timeline.end(0, epoch)
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]


def test_marks_are_bounded(tmp_path: Path) -> None:
    written(tmp_path, 0, 1, *(f"model {n % 2}" for n in range(1000)))
    assert len(command.read(tmp_path)[0].phases) == 64


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline()
    timeline.begin(tmp_path / "missing")
    timeline.mark("loading")
    timeline.end(4, 2)
    assert "will miss epoch 2 of role 4" in caplog.text and not timeline.running


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 0, 1, "forked", "step")
    written(tmp_path, 1, 2, "forked", "model", "step", passed=1000)
    written(tmp_path, 0, 2, "unwinding", "step")
    call = ["--job-dir", str(tmp_path), "timeline"]
    assert ctl.main(call) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("epoch 2:")
    assert shown[1].startswith("role 0: ") and "unwinding" in shown[1]
    assert shown[2].startswith("role 1: ") and "model" in shown[2]
    assert "1,000 steps" in shown[3]
    assert ctl.main([*call, "--epoch", "1", "--json", "--trace", str(tmp_path / "trace")]) == 0
    assert json.loads(capsys.readouterr().out)["role"] == 0
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 7 and {event["tid"] for event in slices} == {0, 1}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"role 0", "role 1"}


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["--job-dir", str(tmp_path), "timeline"]
    assert ctl.main(call) == 2
    assert "no time line of any worker" in capsys.readouterr().err
    written(tmp_path, 0, 1, "step")
    assert ctl.main([*call, "--epoch", "5"]) == 2
    assert "no time line of epoch 5: there are [1]" in capsys.readouterr().err
    with (tmp_path / "logs" / "node0" / "worker-0" / NAME).open("a") as file:
        file.write('{"role": 1, "epo')  # by a worker that was killed, or is writing
    assert len(command.read(tmp_path)) == 1

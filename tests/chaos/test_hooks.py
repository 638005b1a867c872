"""Commands that the controller runs when something happens to a whole job (`--ft-on`)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import etcd_members
from etcd_members import Members
from harness import Job, Layout, check_clean, check_identical
from machines import Machines
from processes import alive

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 40


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_commands_are_told_of_a_node_that_is_lost(tmp_path: Path) -> None:
    """And of the job's end. Those that fail, hang, never stop talking or leave a daemon do it no harm."""
    notify = program(tmp_path / "notify", f"cat >> {tmp_path}/$FT_EVENT; env > {tmp_path}/env-$FT_EVENT")
    hangs = program(tmp_path / "hangs", f"echo $$ > {tmp_path}/hangs.pid; exec sleep 1000")
    talks = program(tmp_path / "talks", f"echo $$ > {tmp_path}/talks.pid; exec yes")
    daemon = program(
        tmp_path / "daemon", f"setsid sh -c 'echo $$ > {tmp_path}/daemon.pid; exec sleep 1000' & sleep 0.2"
    )
    told = ("detected", "avoided", "resumed", "finished")
    flags = [*(f"--ft-on={event}={notify}" for event in told), "--ft-on=detected=false"]
    # The last one begins at the job's end, and hangs then.
    flags += [f"--ft-on=detected={talks}", f"--ft-on=detected={daemon}", f"--ft-on=finished={hangs}"]
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED, ftrun=("--ft-strikes=1/60", *flags)) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        job.kill_nodes(1)
        job.wait_for("resumed", 2)
        job.until((tmp_path / "daemon.pid").exists, "daemon")
        result = job.finish()
    daemon_pid, talks_pid, hangs_pid = (
        int((tmp_path / f"{name}.pid").read_text()) for name in ("daemon", "talks", "hangs")
    )
    try:
        assert alive(daemon_pid) and not alive(hangs_pid) and not alive(talks_pid)
    finally:
        os.kill(daemon_pid, signal.SIGKILL)
    check_identical(result, LAYOUT, STEPS)
    check_clean(result)
    for event in told:
        assert lines(tmp_path / event) == result.of(event) != [], event
    assert [event["node"] for event in result.of("avoided")] == ["node1"]
    found = dict(line.partition("=")[::2] for line in (tmp_path / "env-avoided").read_text().splitlines())
    job_id = (tmp_path / "job" / "id").read_text().strip()
    about = found["FT_EVENT"], found["FT_NODE"], found["FT_JOB_ID"], found["FT_JOB_DIR"]
    assert about == ("avoided", "node1", job_id, str(tmp_path / "job"))
    assert (tmp_path / "job" / "secret").read_text().strip() not in found.values()
    assert result.output.count("--ft-on detected=false (node node1, epoch ") == 1
    assert f"--ft-on finished={hangs} (epoch 2) was ended with the job" in result.output
    assert "--ft-on detected=false" in (tmp_path / "job" / "logs" / "controller.log").read_text()


@etcd_members.needed
def test_only_the_leader_runs_commands(tmp_path: Path) -> None:
    """Those of its own events; and its environment has no secret, though the job is given it there."""
    notify = program(tmp_path / "notify", "cat >> $FT_JOB_DIR/told; env > $FT_JOB_DIR/env")
    events = ("started", "decided", "controller_restarted", "resumed", "finished")
    flags = [f"--ft-on={event}={notify}" for event in events]
    with (
        Members() as etcd,
        Machines(tmp_path, etcd.place("job"), LAYOUT, 120, PACED, spares=0, flags=flags) as job,
    ):
        job.until(lambda: job.events("resumed"), "first step")
        first, pid = job.leader()
        job.until(lambda: len(lines(first.job_dir / "told")) == 3, "commands of the first leader")
        os.kill(pid, signal.SIGKILL)
        job.until(lambda: job.events("controller_restarted"), "successor")
        result = job.finish()
    check_identical(result, LAYOUT, 120)
    terms = []
    for machine in job.machines:
        told, own = lines(machine.job_dir / "told"), lines(machine.job_dir / "events.jsonl")
        by_time = sorted(told, key=lambda event: event["time"])  # several run at once
        assert by_time == [event for event in own if event["event"] in events]
        terms += [event["term"] for event in by_time]
        if told:
            assert "of several machines" not in (machine.job_dir / "env").read_text()
    assert set(terms) == {event["term"] for event in result.events} and len(set(terms)) > 1

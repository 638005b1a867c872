"""What a person is told of a job while it runs: on the console, by `ftctl`, by probes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib import error, request

from deepspeed_jobs import SCRIPTS, variables, write_config
from harness import Job, check_accounted, check_clean

STEPS = 22


@dataclass(frozen=True)
class SlowLoop:
    """Training of a script that takes its time."""

    signals: Path
    world: int = 2
    script: Path = SCRIPTS / "slow_loop.py"

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        path = write_config("slow", config | {"zero_optimization": {"stage": 1}}, protected)
        return [f"--train-iters={iterations}", f"--signals={self.signals}", f"--deepspeed_config={path}"]

    def environment(self) -> dict[str, str]:
        return variables()


def said(console: str) -> list[str]:
    """By the job itself, but for how far a start or a recovery is."""
    lines = re.findall(r"ftrun: (.*)", console)
    return [line for line in lines if not re.match(r"(starting|recovering): |all roles train", line)]


def ready(job: Job) -> tuple[int, str]:
    url = (job.job_dir / "http").read_text().strip()
    try:
        with request.urlopen(f"{url}/readyz", timeout=30) as answer:
            return answer.status, ""
    except error.HTTPError as answer:
        return answer.code, answer.read().decode().strip()


def test_survivors_that_stand_still_do_no_steps(tmp_path: Path) -> None:
    """A newcomer's script passes the steps that are done: that is recovery, for whoever asks."""
    with Job(tmp_path / "job", SlowLoop(tmp_path), STEPS, ftrun=("--ft-inject=0@between:20:worker",)) as job:
        job.wait_for("resumed", timeout=90)
        assert job.until(lambda: ready(job) == (200, ""), "readiness") and not said(job.console())
        [complaint] = job.until(
            lambda: re.findall(r"^restoring: no step for [2-9] s$", ready(job)[1], re.M), "standing still"
        )
        told = job.ctl("status").splitlines()[1]
        assert told.startswith("it does not get on: restoring: no step for ") and complaint
        assert "restoring" in next(x for x in job.ctl("top", "--once").splitlines() if "goodput" in x)
        (tmp_path / "go").touch()
        (tmp_path / "end").touch()
        result = job.finish()
    assert result.code == 0
    failure, recovered = said(result.output)
    assert re.fullmatch(r"failure in step 2\d: worker \d+ of role 0 on node0: killed by SIGKILL", failure)
    assert re.fullmatch(
        r"recovered after .* s: role 0 on node0, state from memory; at step 2\d: .*", recovered
    )
    assert result.of("resumed")[1]["reason"] == recovered, "events say the same"
    [restored], [resumed] = (
        [e for e in result.of(n) if e["epoch"] == 2] for n in ("state_restored", "resumed")
    )
    stood = resumed["time"] - restored["time"]
    assert sum(resumed["unfinished"].values()) < stood / 2, "one step"
    assert result.events[-2]["spent"]["seconds"]["restoring"] > stood / 2
    check_accounted(result)
    check_clean(result)


def test_a_job_that_is_not_protected_says_so_at_once(tmp_path: Path) -> None:
    about = {"protected": False, "ftrun": ("--max-restarts=0",)}
    with Job(tmp_path / "job", SlowLoop(tmp_path), STEPS, **about) as job:  # type: ignore[arg-type]
        [event] = job.wait_for("unprotected", timeout=90)
        why = re.search(
            r"the DeepSpeed configuration \S+/slow.json has no fault_tolerance section", event["reason"]
        )
        assert why and event["reason"].startswith("this job is not protected: ")
        job.until(lambda: said(job.console()), "a line")
        assert said(job.console()) == [event["reason"]]
        assert job.ctl("status").splitlines()[1] == f"not protected: {why[0]}"
        assert job.metrics()["ft_protected"] == 0
        job.kill_worker(0)
        result = job.finish()
    assert result.code == 1 and len(result.of("unprotected")) == 1
    assert said(result.output)[-1].endswith(f"killed by SIGKILL; the job is not protected: {why[0]}")
    assert "--ft" not in result.output
    check_clean(result)

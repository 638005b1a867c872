"""A job that ends before its script does saves: started again, it ends as the undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from deepspeed_jobs import Zero
from harness import Job, Layout, Result, Training, check_clean, different, reference

from ft_core.state.durable import complete, version_of

HERE = Path(__file__).parent
PACED = HERE / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 40
NEVER_AGAIN = "--max-restarts=0"


def ignores(job: Job, number: signal.Signals) -> bool:
    """Whether `ftrun` does: a shell's `&` has its command ignore Ctrl-C."""
    lines = Path(f"/proc/{job.process.pid}/status").read_text().splitlines()
    [mask] = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def check_saved(result: Result, where: Path, world: int = LAYOUT.world) -> int:
    """The newest version is there, is whole, and it is said how to go on. Returns which it is."""
    [saved] = result.of("saved")
    name = complete(str(where), world)[-1]
    assert saved["version"] == version_of(name) and f"{where}/{name}" in saved["reason"]
    assert f"ftrun: step {saved['version']} is saved" in result.output
    assert result.events[-1]["event"] == "stopped"
    check_clean(result)
    # At most one step is done again.
    assert saved["version"] >= max(result.losses) - 1
    return int(saved["version"])


def check_goes_on(
    result: Result, before: Result, version: int, training: Training = LAYOUT, steps: int = STEPS
) -> None:
    """Both jobs together are the undisturbed one."""
    expected = reference(training, steps)
    assert result.code == 0, result.output[-4000:]
    [began] = result.of("decided")
    assert (began["origin"], began["version"]) == ("durable", version)
    assert result.digest == expected.digest
    assert different({**before.losses, **result.losses}) == expected.losses


def test_a_script_that_fails(tmp_path: Path) -> None:
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}",)
    about = {"spares": 0, "ftrun": (*durable, NEVER_AGAIN), "script": HERE / "faulty.py"}
    with Job(tmp_path / "first", LAYOUT, STEPS, **about) as job:
        first = job.finish()
    assert first.code == 1 and "ZeroDivisionError: a bug of the user's" in first.output
    version = check_saved(first, tmp_path / "durable")
    assert version == 3
    with Job(tmp_path / "second", LAYOUT, STEPS, spares=0, ftrun=durable) as job:  # its error is mended
        second = job.finish()
    check_goes_on(second, first, version)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_are_told_to_end(number: signal.Signals, tmp_path: Path) -> None:
    """With the newest state that the job has, and not that of the last checkpoint on its way."""
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}", "--ft-durable-interval=1000")
    about = {"spares": 0, "ftrun": durable, "script": PACED}
    with Job(tmp_path / "first", LAYOUT, STEPS, **about) as job:
        job.wait_for_step(5)
        if ignores(job, number):
            pytest.skip("whoever runs the tests has it ignored")
        job.process.send_signal(number)
        first = job.finish()
    assert first.code == 128 + number
    assert "ftrun: the job stops: it was told to end (SIGTERM)" in first.output
    version = check_saved(first, tmp_path / "durable")
    with Job(tmp_path / "second", LAYOUT, STEPS, **about) as job:
        second = job.finish()
    check_goes_on(second, first, version)


GOES_ON = f"""
import runpy, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
sys.path.insert(0, {str(HERE)!r})
runpy.run_path({str(PACED)!r}, run_name="__main__")
"""


def test_workers_that_handle_the_signal_and_go_on_have_their_time_and_then_it_is_saved(
    tmp_path: Path,
) -> None:
    script = tmp_path / "goes_on.py"
    script.write_text(GOES_ON)
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}",)
    about = {"spares": 0, "ftrun": (*durable, "--shutdown-timeout=8"), "script": script}
    with Job(tmp_path / "first", LAYOUT, 100 * STEPS, **about) as job:
        job.wait_for_step(5)
        job.process.send_signal(signal.SIGTERM)
        first = job.finish()
    assert first.code == 143
    check_saved(first, tmp_path / "durable")


def test_without_a_durable_directory_it_is_the_jobs(tmp_path: Path) -> None:
    """A node is lost: its role's part is put together from others' copies, and written where these are."""
    about = {"spares": 0, "script": PACED}
    with Job(tmp_path / "first", LAYOUT, STEPS, ftrun=("--ft-policy=stop",), **about) as job:
        job.wait_for_step(5)
        job.kill_nodes(1)
        first = job.finish()
    assert first.code == 1 and "policy is stop" in first.output
    where = tmp_path / "first" / "saved"
    version = check_saved(first, where)
    assert f"start the same command again with --ft-durable-dir {where}" in first.output
    again = (f"--ft-durable-dir={where}",)
    with Job(tmp_path / "second", LAYOUT, STEPS, ftrun=again, **about) as job:
        second = job.finish()
    check_goes_on(second, first, version)


@pytest.mark.parametrize("what", ["file", "other"])
def test_what_cannot_be_saved_is_said_and_changes_nothing_else(what: str, tmp_path: Path) -> None:
    """Storage that fails; and copies that are lost."""
    place = tmp_path / "durable"
    about = {"spares": 0, "script": PACED}
    ftrun = (f"--ft-durable-dir={place}", "--ft-policy=stop", NEVER_AGAIN)
    replicas = ("--ft-replicas=0",) if what == "other" else ()
    with Job(tmp_path / "job", LAYOUT, STEPS, ftrun=(*ftrun, *replicas), **about) as job:
        job.wait_for_step(5)
        if what == "file":
            place.write_text("no directory")
        job.kill_nodes(1)
        result = job.finish()
    assert result.code == 1 and result.of("not_saved") and not result.of("saved")
    assert "is not saved: " in result.output and not complete(str(place), LAYOUT.world)
    check_clean(result)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
def test_deepspeed(stage: int, tmp_path: Path) -> None:
    training, steps = Zero(stage, dp=2), 12
    durable = (f"--ft-durable-dir={tmp_path / 'durable'}",)
    error = ("--ft-inject", "1@forward:5:errors", NEVER_AGAIN)
    with Job(tmp_path / "first", training, steps, spares=0, ftrun=(*durable, *error)) as job:
        first = job.finish()
    assert first.code == 1
    version = check_saved(first, tmp_path / "durable", training.world)
    assert version == 5
    with Job(tmp_path / "second", training, steps, spares=0, ftrun=durable) as job:
        second = job.finish()
    check_goes_on(second, first, version, training, steps)

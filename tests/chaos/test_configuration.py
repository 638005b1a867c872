"""Settings that the script brings at run time hold for the whole job: later nodes and controllers, too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from harness import Job, Layout, check_clean, check_survivors, read_logs

SCRIPT = Path(__file__).parent / "configured.py"
LAYOUT = Layout(1, 1, 2)


def job(path: Path, steps: int, *settings: dict, ftrun: tuple[str, ...] = (), spares: int = 0) -> Job:
    brought = (f"--settings={json.dumps(settings)}", f"--after={path.parent / 'go'}")
    return Job(path, LAYOUT, steps, script=SCRIPT, flags=brought, ftrun=ftrun, spares=spares, protected=False)


def events_of(running: Job, name: str) -> list[dict]:
    return [event for event in running.events() if event["event"] == name]


def asking(running: Job) -> list[str]:
    """What the roles have said, once both have."""
    said = [line for line in read_logs(running.job_dir).split("\n") if line.startswith("asking")]
    return said if len(said) == LAYOUT.world else []


def check_counts(losses: dict[int, list[str]], steps: range) -> None:
    """Both roles had counted every step but the one under way, whatever was lost in between.

    Each tells of it, and again of one that is done again.
    """
    found = {step: set(told) for step, told in losses.items()}
    assert found == {step: {str(LAYOUT.world * 4 * (step - 1))} for step in steps}


def test_settings_of_the_script_hold_for_the_whole_job(tmp_path: Path):
    durable = tmp_path / "durable"
    settings = {"replicas": 0, "policy": "stop", "durable_dir": str(durable), "durable_interval": 5}
    with job(tmp_path / "first", 10_000, settings, spares=1) as first:
        first.wait_for("decided")
        first.process.send_signal(signal.SIGSTOP)  # ftrun would start another
        os.kill(first.status()["controller_pid"], signal.SIGKILL)
        (tmp_path / "go").touch()
        asked = first.until(lambda: asking(first), "both roles' settings")
        assert sorted(asked) == ["asking 0", "asking 1"]
        first.process.send_signal(signal.SIGCONT)
        first.wait_for("durable", 2)
        assert [e["reason"] for e in events_of(first, "configured")] == [
            f"replicas 0, policy stop, durable_dir {durable}, durable_interval 5"
        ]
        os.kill(first.status()["controller_pid"], signal.SIGKILL)
        first.wait_for("controller_restarted", 2)
        assert all(not row["replicas"] and not row["h2h_bytes"] for row in first.status()["roles"])
        written = len(events_of(first, "durable"))
        first.wait_for("durable", written + 2)
        assert first.ctl("kill", "--node", "node1") == "killed node1\n"
        decided = first.wait_for_epoch("decided", 2)
        assert decided["origin"] == "durable" and decided["moved"] == {"1": "node2"}
        first.wait_for_epoch("resumed", 2)
        before = len(events_of(first, "durable"))
        first.wait_for("durable", before + 2)  # the spare writes them, too
        first.ctl("kill", "--node", "node2")
        result = first.finish()
    assert result.code == 1 and "policy is stop" in result.output
    check_survivors(result, LAYOUT.world)
    check_clean(result)
    reached = max(result.losses)
    check_counts(result.losses, range(1, reached + 1))

    with job(tmp_path / "second", reached + 20, settings) as second:
        result = second.finish()
    assert result.code == 0
    began = result.of("decided")[-1]
    assert began["origin"] == "durable" and began["version"] >= 5 and not began["roles"]
    check_counts(result.losses, range(began["version"] + 1, reached + 21))
    check_survivors(result, LAYOUT.world)


def test_settings_that_cannot_be_had(tmp_path: Path):
    wrong = [
        {"policy": "stop"},
        {"spares": 2},
        {"replicas": 2},
        {"replicas": True},
        {"replica": 1},
        {"durable_interval": 5},
        {"policy": "wait", "replicas": 0},
        {"policy": "wait", "replicas": 1},
    ]
    (tmp_path / "go").touch()
    with job(tmp_path / "job", 20, *wrong, ftrun=("--ft-policy=wait",)) as tried:
        result = tried.finish()
    assert result.code == 0
    check_counts(result.losses, range(1, 21))
    said = [line for line in read_logs(tmp_path / "job").splitlines() if line.startswith("refused")]
    source = "the script's configuration"
    expected = [
        f"--ft-policy wait of ftrun contradicts {source}, which says policy stop",
        f"--spares 0 of ftrun contradicts {source}, which says spares 2",
        f"replicas ({source}) 2 needs 3 nodes or more; there are 2",
        f"{source}: replicas must be int, got True",
        f"{source}: there is no setting 'replica'",
        f"durable_interval ({source}) needs --ft-durable-dir",
        "another has brought {'policy': 'wait', 'replicas': 0}",
    ]
    for role in range(LAYOUT.world):
        mine = [line for line in said if line.startswith(f"refused {role}: ")]
        assert len(mine) == len(expected)
        assert all(text in line for text, line in zip(expected, mine, strict=True))

"""docs/start/own_loop.md does what it says: its command is run as it stands there, and no line of the log is
lost."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, environment, plain_environment

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

PAGE = (ROOT / "docs" / "start" / "own_loop.md").read_text()
NAME = "recipes/megatron/own_loop.py"
SCRIPT = (ROOT / NAME).read_text()
[COMMAND] = re.findall(r"^```bash\nftrun (.*?)^```$", PAGE, re.M | re.S)
assert NAME in COMMAND
STEPS = 30


def run(module: str, words: str, script: str, directory: Path, variables: dict[str, str]) -> list[str]:
    """The lines that are printed."""
    (directory / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", module, *words.replace("\\\n", " ").split()],
        **{"cwd": directory, "env": variables, "timeout": 150, "text": True, "capture_output": True},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Under torchrun two ranks write to one pipe, and now and then both into one line.
    return [line.strip() for line in re.findall(r"(?:step|rank) \d(?:(?!step \d|rank \d).)*", done.stdout)]


def test_the_page_has_the_scripts_lines() -> None:
    [shown] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    lines = [line.partition("#")[0].strip() for line in shown.splitlines()]
    assert "training.run(train)" in lines
    assert [line for line in lines if line not in SCRIPT] == []


@pytest.mark.parametrize("slow", [False, True])
def test_a_loop_of_ones_own(slow: bool, tmp_path: Path) -> None:
    """Also one in which a worker dies when its step is done and its line is not written yet."""
    command, script = COMMAND.replace(NAME, "train.py"), SCRIPT
    if slow:
        done = "        training.step_done(loss)"
        assert script.count(done) == 1
        script = script.replace(done, f"{done}; __import__('time').sleep(0.2); training.point('between')")
        script, command = (
            script.replace("default=30", "default=9"),
            command.replace("0@optimizer:20", "0@between:6"),
        )
        command = command.replace("1@optimizer:10", "0@between:3:worker")
    plain = "--standalone --nproc-per-node=2 train.py"
    expected = run("torch.distributed.run", plain, script, tmp_path, plain_environment())
    assert len(expected) == (9 if slow else STEPS) + 2
    found = run("ft_core.cli.launch", command, script, tmp_path, environment())
    assert sorted(found) == sorted(expected)
    events = (tmp_path / "job" / "events.jsonl").read_text()
    assert events.count('"event": "decided"') == 3

"""docs/tutorial.md does what it says: its files are written, its commands are run, as they stand there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, Result, check_clean, check_survivors, environment, plain_environment

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FILES = dict(re.findall(r'^```python title="(.+?)"\n(.*?)^```$', PAGE, re.M | re.S))
PLAIN, PROTECTED, EVENTS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = f"""
torchrun() {{ {sys.executable} -m torch.distributed.run "$@"; }}
ftrun() {{ {sys.executable} -m ft_core.cli.launch "$@"; }}
"""


def run(command: str, directory: Path, variables: dict[str, str]) -> str:
    """What a command of the page prints, in the directory with its files."""
    process = subprocess.Popen(
        ["bash", "-c", COMMANDS + command],
        cwd=directory,
        env={name: value for name, value in variables.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        pytest.fail(f"{command} hangs: {process.communicate()[0][-4000:]}")
    assert process.returncode == 0, output[-4000:]
    return output


def losses(output: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for step, loss in re.findall(r"step (\d+) loss (\d+\.\d{6})", output):
        found.setdefault(int(step), []).append(loss)
    return found


def digests(output: str) -> set[tuple[str, str]]:
    return set(re.findall(r"rank (\d) ends with ([0-9a-f]{64})", output))


def test_tutorial(tmp_path: Path) -> None:
    assert sorted(FILES) == ["loop_adapter.py", "plain.py", "train.py"]
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    plain = run(PLAIN, tmp_path, plain_environment())
    assert sorted(losses(plain)) == list(range(1, 31))
    (zero, digest), (one, same) = sorted(digests(plain))
    assert (zero, one) == ("0", "1") and digest == same

    protected = run(PROTECTED, tmp_path, environment())
    assert losses(protected) == losses(plain)
    assert digests(protected) == digests(plain)

    lines = (tmp_path / "job" / "events.jsonl").read_text().splitlines()
    result = Result(0, protected, losses(protected), digest, [json.loads(line) for line in lines])
    assert [e["version"] for e in result.of("decided") if e["epoch"] > 1] == [10, 20]
    assert [e["roles"] for e in result.of("detected")] == [[1], [0]]
    check_survivors(result, 2)
    check_clean(result)
    shown = run(EVENTS, tmp_path, environment())
    for number in (2, 3):
        assert f'"event": "resumed", "epoch": {number}' in shown

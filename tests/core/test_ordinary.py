"""A script finds itself in a process like any other, although its worker is forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CARD = Path(__file__).with_name("card.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )


def test_a_script_is_told_what_a_plain_process_is_told(tmp_path: Path):
    """Start method, parent, `__main__`, path, signals, warnings; random numbers are everybody's own."""
    plain = run(str(CARD), str(tmp_path), cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    flags = ["--standalone", "--nproc-per-node=2", f"--job-dir={tmp_path / 'job'}"]
    job = run("-m", "ft_core.launch", *flags, str(CARD), str(tmp_path), cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stderr == plain.stderr == "", "no tracker complains of what was left"
    expected, *cards = (json.loads((tmp_path / rank).read_text()) for rank in ("plain", "0", "1"))
    for card in cards:
        assert card["told"] == expected["told"]
    for numbers in zip(*(card["own"] for card in (expected, *cards)), strict=True):
        assert len(set(numbers)) == 3, "a generator's state is inherited"
    for rank in ("0", "1"):
        assert (tmp_path / f"{rank}.exit").exists() and (tmp_path / f"{rank}.thread").exists()

"""A script finds itself in a process like any other, although its worker is forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT

CARD = Path(__file__).with_name("card.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )


def test_a_script_is_told_what_a_plain_process_is_told(tmp_path: Path):
    """Start method, parent, `__main__`, path, signals, warnings, forks, files; random numbers are its own."""
    plain = run(str(CARD), str(tmp_path), cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    flags = ["--standalone", "--nproc-per-node=2", f"--job-dir={tmp_path / 'job'}"]
    job = run("-m", "ft_core.cli.launch", *flags, str(CARD), str(tmp_path), cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    own = [line for line in job.stderr.splitlines() if not line.startswith("ftrun: ")]  # of a slow machine
    said = [line.split(" ft ")[-1] for line in own]
    told, warned = ["as the script wants it: told", "WARNING of ftrun's own"], plain.stderr.splitlines()[:2]
    assert plain.stderr.splitlines()[2:] == [told[0], f"as the script wants it: {told[1][8:]}"]
    assert sorted(said) == sorted([*warned, *told, *told]), "no tracker complains of what was left"
    assert plain.stdout == job.stdout == "imported\nimported by C\nprinted by C\n"
    expected, *cards = (json.loads((tmp_path / rank).read_text()) for rank in ("plain", "0", "1"))
    for card in cards:
        assert card["told"] == expected["told"]
    for numbers in zip(*(card["own"] for card in (expected, *cards)), strict=True):
        assert len(set(numbers)) == 3, "a generator's state is inherited"
    for rank in ("0", "1"):
        assert (tmp_path / f"{rank}.exit").exists() and (tmp_path / f"{rank}.thread").exists()


FAILS = """
import multiprocessing, os, sys
lock = multiprocessing.Lock()
def hook(kind, error, trace):
    print("the hook has", kind.__name__, file=sys.stderr)
    sys.__excepthook__(kind, error, trace)
sys.excepthook = hook
if os.environ["RANK"] == "1":
    raise ValueError("the script's own,\\nof two lines")
import time
time.sleep(1000)
"""


def test_a_script_that_fails(tmp_path: Path):
    """The console has its traceback once, as it would be without `ftrun`; nothing complains of the end."""
    (tmp_path / "fails.py").write_text(FAILS)
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", f"--job-dir={tmp_path / 'job'}"]
    job = run("-m", "ft_core.cli.launch", *flags, "fails.py", cwd=tmp_path)
    assert job.returncode == 1
    said = job.stderr
    assert said.count("Traceback") == 1 and "the hook has ValueError" in said
    assert "ft_core" not in said and "runpy" not in said and "leaked" not in said
    _, _, reason = said.partition("ftrun: the job stops: ")
    assert "of role 1 on node0: exit code 1: ValueError: the script's own,; no step was done yet" in reason
    assert "\nValueError: the script's own,\nof two lines\n" in reason
    assert (tmp_path / "job" / "logs" / "role-1" / "stderr.log").read_text().count("Traceback") == 1


HELPER = """
import os, random, threading
import numpy, torch
RANK, LOCAL_RANK = int(os.environ.get("RANK", -1)), int(os.environ.get("LOCAL_RANK", -1))
IS_MAIN, FAST, ASKED = RANK == 0, os.environ.get("MY_FAST"), os.environ.get("MY_ARGUMENT")
torch.manual_seed(1234 + RANK); random.seed(7); numpy.random.seed(7)
STOP = threading.Event()
THREAD = threading.Thread(target=STOP.wait, daemon=True); THREAD.start()
TABLE = torch.arange(1 << 20).float().sin()
"""
USES = """
import os, sys
os.environ["MY_FAST"] = "1"
os.environ["MY_ARGUMENT"] = sys.argv[1]
import random, numpy, torch
import helper, installed
offline = installed.OFFLINE
drawn = random.random(), numpy.random.rand(), torch.rand(1).item(), (helper.TABLE + 1).sum().item()
seen = helper.RANK, helper.LOCAL_RANK, helper.IS_MAIN, helper.FAST, helper.ASKED
seen = *seen, helper.THREAD.is_alive(), offline, drawn
with open(f"{sys.argv[2]}-{os.environ['RANK']}", "w") as file:
    print(seen, file=file)
helper.STOP.set()
"""


def test_a_scripts_modules_are_those_that_it_would_import(tmp_path: Path):
    """A helper reads its rank, seeds, has a thread, computes; a package reads what the script sets."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "helper.py").write_text(HELPER)
    (tmp_path / "job" / "uses.py").write_text(USES)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "installed.py").write_text("import os\nOFFLINE = os.environ.get('MY_ARGUMENT')\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}", "OMP_NUM_THREADS": "2"}
    flags = ["--standalone", "--nproc-per-node=2"]
    script = [str(tmp_path / "job" / "uses.py"), "yes"]
    for name, module in (("torchrun", "torch.distributed.run"), ("ftrun", "ft_core.cli.launch")):
        command = [sys.executable, "-m", module, *flags, *script, str(tmp_path / name)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        plain = (tmp_path / f"torchrun-{rank}").read_text()
        assert (tmp_path / f"ftrun-{rank}").read_text() == plain
        assert plain.startswith(f"({rank}, {rank}, {rank == 0}, '1', 'yes', True, 'yes', (")

"""What the benchmarks share: environment, machine, CPU times out of /proc, tables, results as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RECIPE = ROOT / "recipes" / "megatron" / "pretrain_gpt_core.py"
_TICKS = os.sysconf("SC_CLK_TCK")


def environment() -> dict[str, str]:
    """One thread per worker, and quiet libraries."""
    quiet = {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **quiet}


def ftrun(job_dir: Path, *flags: str) -> list[str]:
    """The start of a command that runs a job on this machine, quietly: what workers print goes to files."""
    return [
        sys.executable,
        "-m",
        "ft_core.cli.launch",
        "--standalone",
        f"--job-dir={job_dir}",
        "--tee=0",
        *flags,
    ]


def read_events(job_dir: Path) -> list[dict[str, Any]]:
    """What the controller of a job has recorded so far, in whole lines."""
    path = job_dir / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def printed(job_dir: Path) -> str:
    """What all workers of a job have printed."""
    return "".join(path.read_text() for path in sorted(job_dir.glob("logs/*/worker-*/stdout.log")))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, in seconds, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has. From here on SIGTERM ends it as Ctrl-C does, with all it has
    started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="print the result as JSON and nothing else, or write it to FILE",
    )
    p.add_argument("--save", action="store_true", help="also write it to benchmarks/results/")
    p.add_argument("--quick", action="store_true", help="few repetitions: to see that it works, not to quote")
    return p


def finish(name: str, args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Print a benchmark's result as asked for, and save it."""
    options = {k: v for k, v in vars(args).items() if k not in ("json", "save")}
    full = {"benchmark": name, **about(), "options": options, **result}
    print(json.dumps(full, indent=1) if args.json == "-" else text, flush=True)
    if args.json not in (None, "-"):
        Path(args.json).write_text(json.dumps(full, indent=1) + "\n")
    if args.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps(full, indent=1) + "\n")
        print(f"written to {path.relative_to(ROOT)}", file=sys.stderr)


def about() -> dict[str, Any]:
    """Date, machine and commit: without them a figure says nothing."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") or os.environ.get("FT_COMMIT", ""),
        "uncommitted": bool(
            _git("status", "--porcelain", "--", "ft_core", "ft_megatron", "recipes", "benchmarks/*.py")
        ),
        "machine": {
            "cpu": model[0].partition(":")[2].strip() if model else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory, 1),
            "load_before": round(_LOAD, 2),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


_LOAD = os.getloadavg()[0]
"""When this process began: a loaded machine gives other figures."""


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and number of `values`."""
    ordered = sorted(values)
    low, _, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return {
        "median": statistics.median(ordered),
        "p25": low,
        "p75": high,
        "min": ordered[0],
        "max": ordered[-1],
        "n": len(ordered),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as they must be, the first to the left, the others to the right."""
    cells = [[str(c) for c in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

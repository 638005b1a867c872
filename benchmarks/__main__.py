"""`make bench`: runs every benchmark, one after the other, and saves the results."""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.common import ROOT, environment

ALL = ("collectives", "recovery", "elastic", "overhead")


def main() -> int:
    """Returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions; nothing is saved")
    args = parser.parse_args()
    failed = []
    for name in ALL:
        print(f"\n== {name}\n", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--quick" if args.quick else "--save"]
        if subprocess.run(command, cwd=ROOT, env=environment()).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

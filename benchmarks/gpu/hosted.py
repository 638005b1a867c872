"""Runs a script as a rank that NCCL takes for one of another machine: several can use one GPU."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["NCCL_HOSTID"] = f"ft-gpu-{os.environ['RANK']}"
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Python runs this first in every process of a DeepSpeed test job: references do without a compiler.

On CPUs DeepSpeed compiles an all-reduce over shared memory when it starts: half a minute for each version,
behind a lock that a SIGKILL leaves behind. Only tensor parallelism uses it; workers of `ftrun` never have it.
"""

import importlib
import os
import runpy
from pathlib import Path
from typing import Any

if "TORCHELASTIC_RUN_ID" in os.environ:  # a worker of torchrun, or of `forked`
    # Not by `import`: the package's attribute `torch` is torch itself.
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None

    runpy.run_path(str(Path(__file__).parents[2] / "plain" / "sitecustomize.py"))

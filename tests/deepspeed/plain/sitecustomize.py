"""Python runs this first in every process of a DeepSpeed test job: references do without a compiler.

On CPUs DeepSpeed compiles an all-reduce over shared memory when it starts: half a minute for each version,
behind a lock that a SIGKILL leaves behind. Only tensor parallelism uses it; workers of `ftrun` never have it.
"""

import atexit
import importlib
import os
import sys
from typing import Any

if "TORCHELASTIC_RUN_ID" in os.environ:  # a worker of torchrun, or of `forked`
    # Not by `import`: the package's attribute `torch` is torch itself.
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None

    # torch sometimes aborts a process that has done all its work, while the interpreter takes it down
    # ("terminate called without an active exception"). A reference is judged by what it printed, so its
    # workers leave before that.
    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_type") else 0)

    if "RANK" in os.environ:  # what forks ranks has none
        atexit.register(leave)

"""Runs tests of torch's own suite, of the installed wheel, in one process per rank: bare under `torchrun`, or
with our groups under `ftrun`.

    run.py RESULTS {bare,before,training} TEST...      `*`: all there are

A line of JSON for each test goes to RESULTS/RANK: [name, what became of it, seconds].
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
import types
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT = timedelta(seconds=20)
"""Of groups: a rank that has failed is waited for no longer."""


def suite(results: Path) -> Any:
    """The test case of torch's suite for gloo."""
    os.environ |= {"BACKEND": "gloo", "TEMP_DIR": str(results / "temporary")}
    for name in ("barrier", "test_dir"):
        (results / "temporary" / name).mkdir(parents=True, exist_ok=True)
    # It is for expected texts that are written into sources, which these tests have none of.
    expecttest: Any = sys.modules.setdefault("expecttest", types.ModuleType("expecttest"))
    expecttest.TestCase = unittest.TestCase
    from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def call_dist_op(self, *args: Any, expect_event: bool = True, **kwargs: Any) -> Any:
            # The profiler does not see gloo's operations where another thread issues them.
            seen = expect_event and os.environ.get("FT_COMM") != "strict"
            return super().call_dist_op(*args, expect_event=seen, **kwargs)

    return Suite


def outcome(case: Any, name: str, all_here: Callable[[str], None]) -> str:
    """What became of a test: "passed", "left out", or its error."""
    try:
        at = f"file://{case.file_name}"  # which bare torch needs: torchrun's store has the keys of the last
        dist.init_process_group("gloo", at, timeout=TIMEOUT, rank=RANK, world_size=WORLD)
        dist.barrier()  # a test that is left out ends at once
        torch.manual_seed(0)
        random.seed(0)
        getattr(case, name)()
    except unittest.SkipTest:
        return "left out"
    except SystemExit as error:
        return "left out" if error.code else "passed"
    except BaseException as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        all_here("done")
        case.doCleanups()
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed"


def main(results: Path, how: str, names: list[str]) -> None:
    """Run the tests one after the other, each in process groups of its own."""
    made = suite(results)
    if "*" in names:
        names = [name for name in dir(made) if name.startswith("test_")]
    if how == "training":
        from ft_core.worker import session

        session.current().unprotected("these are tests")
    store = dist.FileStore(str(results / "store"), WORLD)
    with open(results / str(RANK), "w") as file:
        for number, name in enumerate(names):

            def all_here(where: str, number: int = number) -> None:
                store.set(f"{number} {where} {RANK}", "")
                store.wait([f"{number} {where} {rank}" for rank in range(WORLD)], 3 * TIMEOUT)

            all_here("begun")
            case = made(name)
            case.rank, case.file_name = RANK, str(results / f"init {number}")
            began = time.monotonic()
            found = outcome(case, name, all_here)
            file.write(json.dumps([name, found, round(time.monotonic() - began, 1)]) + "\n")
            file.flush()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

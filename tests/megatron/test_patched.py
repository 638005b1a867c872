"""What is patched is there, in the version of Megatron that the tests use."""

from __future__ import annotations

import subprocess
import sys

from harness import ROOT, environment

SCRIPT = """
import importlib.util
from ft_megatron import cpu_shadow
cpu_shadow.install()
from ft_core.patching import declared
training = importlib.util.find_spec("megatron.training") is not None
for patch in declared(["ft_megatron"]):
    there = patch.target.startswith("megatron.core") or (training and patch.target.startswith("megatron."))
    if there and not patch.optional and not patch.made_later:
        assert patch.original() is not None
        print(patch.target)
"""


def test_there_is_what_is_patched() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.zero_grad" in done.stdout.split()

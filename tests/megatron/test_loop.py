"""What of Megatron's training loop goes with a version, and what is left out where a step was done before."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from harness import ROOT, environment

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

MADE = """
import ft_megatron.cpu_shadow_auto
from types import SimpleNamespace as Some
import torch
from megatron.core.utils import StragglerDetector
from ft_core.state.envelope import decode, encode
from ft_megatron.data import Loaders
from ft_megatron.loop import Loop

def made(**flags):
    args = Some(iteration=0, num_floating_point_operations_so_far=0, **flags)
    rerun = Some(get_mode=lambda: "disabled")
    detector = object.__new__(StragglerDetector)  # of which there is one in a process
    detector.__init__()
    training = Some(get_args=lambda: args, get_rerun_state_machine=lambda: rerun, stimer=detector)
    training._TRAIN_START_TIME = 1.0
    return Loop(training, Loaders(), lambda group: group), training
"""

SKIPPED = """
loop, _ = made(iterations_to_skip=[7])
newcomer, training = made(iterations_to_skip=[7, 17])
newcomer.restore(decode(encode(loop.capture())))
assert training.get_args().iterations_to_skip == [7]
"""

DRAWN = """
torch.manual_seed(1)
before = torch.get_rng_state()
loop, training = made()
loop.enter()
torch.rand(3)  # as --gpu-sniff-test-interval does at the loop's top
loop.answer()
assert torch.equal(torch.get_rng_state(), before)
"""

SWITCHED = """
loop, training = made()
training.stimer._off = False  # by a word to the first rank
newcomer, its = made()
newcomer.restore(decode(encode(loop.capture())))
newcomer.enter()
its.stimer._off = True  # as its flags have it, at the loop's top
its.stimer.start = its.stimer.stop = its.stimer.null_method
newcomer.answer()
assert its.stimer.enabled and its.stimer.start == its.stimer.start_method
training.stimer._off = True
newcomer.restore(decode(encode(loop.capture())))
newcomer.enter()
newcomer.answer()
assert not its.stimer.enabled and its.stimer.stop == its.stimer.null_method
"""

REPORTED = """
import tempfile
import torch.distributed as dist
from ft_megatron import patched
from ft_megatron.pretrain import Hooks

dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tempfile.mktemp()}")
for name in ("temperature", "power_draw", "utilization", "clock_rate"):
    setattr(torch.cuda, name, lambda: 0)
_, training = made()
StragglerDetector._configured = False
training.stimer.configure(1, 1, enabled=True)  # the first rank has a server
hooks = object.__new__(Hooks)
hooks._training, hooks._answered = training, True
patched.STRAGGLERS.wrap(lambda report: lambda *args: hooks.report(report, *args), of=training.stimer)

assert training.stimer.report(1e12, 1) is False  # who came for a step that was done before measured nothing
assert training.stimer.enabled
hooks._answered = False
try:
    training.stimer.report(1e12, 1)
except ZeroDivisionError:
    pass
else:
    raise RuntimeError("Megatron divides by what was measured")
"""


def run(script: str) -> None:
    command = [sys.executable, "-c", MADE + script]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_a_newcomer_skips_the_iterations_that_its_peers_skip() -> None:
    """And not those that a file has had since they were started (--result-rejected-tracker-filename)."""
    run(SKIPPED)


def test_what_the_loop_draws_at_its_top_is_drawn_once() -> None:
    run(DRAWN)


def test_stragglers_are_looked_for_on_all_ranks_or_on_none() -> None:
    run(SWITCHED)


def test_no_stragglers_are_reported_of_a_step_that_was_done_before() -> None:
    run(REPORTED)

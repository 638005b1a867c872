"""A bit that flips in what several roles hold alike is found, and undone before anything comes of it."""

from __future__ import annotations

import re

import pytest
from deepspeed_jobs import Zero
from harness import Job, Layout, Result, check_identical, check_survivors, reference

ITERATIONS = 14
VERIFY = ("--ft-verify", "--respawn")


def blamed(result: Result) -> list[list[int]]:
    return [event["roles"] for event in result.of("corruption")]


LAYOUTS = [Layout(1, 1, 2), Layout(1, 1, 4), Layout(1, 1, 2, bf16=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_flipped_bit(layout: Layout, tmp_path):
    dp = layout.dp
    injected = f"{dp - 1}@optimizer:5:weight,0@optimizer:9:moment"
    with Job(tmp_path / "job", layout, ITERATIONS, ftrun=(*VERIFY, "--ft-inject", injected)) as job:
        result = job.finish()
    check_identical(result, layout, ITERATIONS)
    check_survivors(result, layout.world)
    assert blamed(result) == [[dp - 1], [0]]
    found = result.of("detected")
    assert [event["fault"] for event in found] == ["corruption"] * 2
    assert [int(re.match(r"version (\d+): ", event["reason"])[1]) for event in found] == [6, 10]
    assert [event["version"] for event in result.of("decided")] == [None, 5, 9]
    odd = [re.search(r"role (\d+) from all others", event["reason"]) for event in found]
    assert [each and int(each[1]) for each in odd] == ([None, None] if dp == 2 else [dp - 1, 0])
    assert not result.of("not_compared")
    assert "not compared with the other holders'" not in result.output


def test_a_flipped_bit_with_deepspeed(tmp_path):
    """Its script may have gone too far to go back: then its worker is replaced. What it has printed of the
    step under way may have been made of what was wrong; the state is not."""
    training = Zero(0, dp=2)
    injected = "1@optimizer:5:weight,0@optimizer:9:moment"
    with Job(tmp_path / "job", training, ITERATIONS, ftrun=(*VERIFY, "--ft-inject", injected)) as job:
        result = job.finish()
    assert result.code == 0, result.output[-4000:]
    assert result.digest == reference(training, ITERATIONS).digest
    assert blamed(result) == [[1], [0]]
    assert [event["fault"] for event in result.of("detected")].count("corruption") == 2
    assert [event["version"] for event in result.of("decided")][:2] == [None, 5]
    assert not result.of("not_compared")


CLEAN = [
    Layout(1, 1, 4, bf16=True),
    Layout(1, 2, 2),
    Layout(1, 1, 2, distributed=True, bf16=True, more=("--ft-snapshot=full",)),
]


@pytest.mark.parametrize("layout", CLEAN, ids=str)
def test_no_alarm_without_one(layout: Layout, tmp_path):
    """Also where workers and a node are lost meanwhile."""
    injected = "0@optimizer:3:worker,1@backward:6:worker,1@forward:9"
    flags = [flag for flag in layout.more if flag.startswith("--ft-")]
    layout = Layout(layout.tp, layout.pp, layout.dp, layout.distributed, layout.bf16)
    ftrun = (*VERIFY, *flags, "--ft-inject", injected)
    with Job(tmp_path / "job", layout, ITERATIONS, spares=1, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, layout, ITERATIONS)
    assert not result.of("corruption") and not result.of("not_compared")
    assert result.recoveries == 3


def test_nothing_to_compare(tmp_path):
    layout = Layout(1, 1, 2, distributed=True, bf16=True)
    with Job(tmp_path / "job", layout, ITERATIONS, ftrun=VERIFY) as job:
        result = job.finish()
    check_identical(result, layout, ITERATIONS)
    assert len(result.of("not_compared")) == 1 and result.recoveries == 0

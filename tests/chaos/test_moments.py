"""A node or a worker is lost at every moment of a step, in every layout: the run ends bit-identically."""

from __future__ import annotations

import pytest
from harness import Job, Layout, check_drills, check_identical, check_survivors

ITERATIONS = 18
LAYOUTS = [
    *(Layout(1, 1, 2, d, b) for d in (False, True) for b in (False, True)),
    *(Layout(1, 2, 2, d, b) for d in (False, True) for b in (False, True)),
    *(Layout(2, 1, 2, d, b) for d in (False, True) for b in (False, True)),
    *(Layout(2, 2, 1, False, b) for b in (False, True)),
]


def moments(layout: Layout, nproc: int) -> dict[str, str]:
    """Moment -> where it is injected. The victims alternate between the nodes."""
    first, last = 0, layout.world - 1
    found = {
        "startup": f"{last}@startup:0",
        "recovery": f"{last}@recovery:0",  # the newcomer of the failure before: a failure during its recovery
        "forward": f"{first}@forward:2",
        "backward": f"{last}@backward:4",
        "gradients": f"{first}@gradients:6",
        "optimizer": f"{last}@optimizer:8",
        "d2h": f"{last}@d2h:12",
    }
    if layout.distributed:
        found["gather"] = f"{first}@gather:10"
    # Only what no other node holds is sent. With pipeline stages, DP peers are neighbours on one node
    # (Megatron's rank order), so everything is; with plain DP across nodes, nothing is.
    if layout.distributed or layout.dp == 1 or (layout.pp > 1 and nproc > 1):
        found["h2h"] = f"{first}@h2h:14"
    # Every second failure takes a whole node, the others one worker; which, changes from layout to layout.
    # What the agent does itself, sending, ends with its node.
    nodes = LAYOUTS.index(layout) % 2
    return {
        point: where if (number + nodes) % 2 or point == "h2h" else f"{where}:worker"
        for number, (point, where) in enumerate(found.items())
    }


QUICK = {"tp1pp2dp2-distopt-bf16", "tp2pp2dp1-plain-bf16"}
"""Each way to keep state, and each way to split a model."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, id=str(x), marks=[] if str(x) in QUICK else pytest.mark.exhaustive) for x in LAYOUTS],
)
def test_every_moment(layout: Layout, tmp_path):
    nproc = layout.world // 2
    injected = moments(layout, nproc)
    ftrun = ("--respawn", "--ft-inject", ",".join(injected.values()))
    with Job(tmp_path / "job", layout, ITERATIONS, nproc=nproc, spares=3, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, layout, ITERATIONS)
    check_survivors(result, layout.world)
    check_drills(result, injected.values())


@pytest.mark.parametrize("how", ["", ":worker"], ids=["node", "worker"])
def test_while_the_weights_are_derived(how: str, tmp_path):
    """All have their shards again, and make the weights of them: what a survivor has was torn twice.

    Nothing is committed between two failures, so of two one is a worker alone.
    """
    layout = Layout(1, 1, 2, True, True)
    injected = [f"0@gather:4{how}", "1@derive:4:worker", "1@gather:8:worker", f"0@derive:8{how}"]
    ftrun = ("--respawn", "--ft-inject", ",".join(injected))
    with Job(tmp_path / "job", layout, 12, nproc=1, spares=2, ftrun=ftrun) as job:
        result = job.finish()
    check_identical(result, layout, 12)
    check_survivors(result, layout.world)
    check_drills(result, injected)

"""Workers that hang for good, which nobody but the detector of hangs finds; and such as wait for data for a
while, which it leaves alone."""

from __future__ import annotations

from random import Random

from .faults import schedule
from .job import Outcome, SimJob
from .schedules import SHAPES
from .world import World

_SEED, _READS = 77, 78
"""Of the draws about those who recover, and those who wait for data."""
_STALL = 8.0, 30.0
"""Seconds of a wait for data: longer than any step takes, and less than anybody may wait for them."""


def hang(job: SimJob, rng: Random) -> None:
    """A worker runs for ever, or is stopped and does not go on, once the job trains."""
    found = [w for node in job.live() for w in node.workers.values() if w.alive and w.trains and not w.hung]
    cluster = job.controller.machine.cluster
    if job.over:
        return
    # Where all loop nobody waits for anybody, and a long evaluation looks the same.
    if not cluster.versions.trained or len(found) < 2:
        job.world.at(0.5, lambda: hang(job, rng))
        return
    worker = rng.choice(found)
    job.world.trace(f"{worker.name} hangs for good")
    job.hung += 1
    if rng.random() < 0.5:
        worker.hung = True
    else:
        worker.stop()


def hang_at_start(job: SimJob, rng: Random) -> None:
    """The same of one that recovers, before its first step."""
    cluster = job.controller.machine.cluster
    if job.over:
        return
    workers = [w for node in job.live() for w in node.workers.values()]
    found = [w for w in workers if w.alive and w.plays and not w.trains and not w.hung and not w.stopped]
    if not cluster.versions.trained or not found:
        job.world.at(0.1, lambda: hang_at_start(job, rng))
        return
    worker = rng.choice(found)
    job.world.trace(f"{worker.name} hangs for good as it starts")
    job.hung += 1
    worker.hung = True


def wait_for_data(job: SimJob, rng: Random) -> None:
    """A worker that trains waits for them, for long, and goes on."""
    found = [w for node in job.live() for w in node.workers.values() if w.alive and w.trains and not w.hung]
    if job.over:
        return
    if not job.controller.machine.cluster.versions.trained or not found:
        job.world.at(0.5, lambda: wait_for_data(job, rng))
        return
    worker, seconds = rng.choice(found), rng.uniform(*_STALL)
    job.world.trace(f"{worker.name} waits {seconds:.1f} s for data")
    worker.reads, job.stalled = True, job.stalled + 1
    job.not_before = max(job.not_before, job.world.now + seconds)

    def go_on() -> None:
        worker.reads = False
        worker.pump()

    worker.later(seconds, go_on)


def stop_standbys(job: SimJob) -> None:
    """One of each node, for good: none of them takes the role that it is given."""
    for node in job.live() if not job.over else ():
        idle = [w for w in node.workers.values() if w.alive and w.role is None and not w.stopped]
        if idle:
            job.world.trace(f"{idle[0].name} is stopped for good before it has a role")
            idle[0].stop()


def simulate(seed: int, world: World | None = None) -> Outcome:
    """A schedule of hangs, and in every second one other faults beside. Raises Violation."""
    rng = Random(seed)
    job = SimJob(world or World(seed), rng.choice(SHAPES))
    last = schedule(job, rng) if seed % 2 else 12.0
    at = 2.0
    if seed % 3 == 0:
        job.world.at(at, lambda: wait_for_data(job, Random(f"{_READS} {seed}")))
        at += _STALL[1]
    for _ in range(rng.choice((1, 1, 2))):
        at += 12 * rng.random()
        job.world.at(at, lambda: hang(job, rng))
    if seed % 4 < 2:
        job.world.at(at, lambda: hang_at_start(job, Random(f"{_SEED} {seed}")))
    if seed % 4 == 2:
        job.world.at(at, lambda: stop_standbys(job))
    return job.run(max(last, at + 1.0) + 15 * rng.random())

"""Workers that hang for good, which nobody but the detector of hangs finds."""

from __future__ import annotations

from random import Random

from .faults import schedule
from .job import Outcome, SimJob
from .schedules import SHAPES
from .world import World

_SEED = 77
"""Of the draws about those who recover."""


def hang(job: SimJob, rng: Random) -> None:
    """A worker runs for ever, or is stopped and does not go on, once the job trains."""
    found = [w for node in job.live() for w in node.workers.values() if w.alive and w.trains and not w.hung]
    facts = job.controller.machine.facts
    if job.over:
        return
    # Where all loop nobody waits for anybody, and a long evaluation looks the same.
    if not facts.trained or len(found) < 2:
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
    facts = job.controller.machine.facts
    if job.over:
        return
    workers = [w for node in job.live() for w in node.workers.values()]
    found = [w for w in workers if w.alive and w.plays and not w.trains and not w.hung and not w.stopped]
    if not facts.trained or not found:
        job.world.at(0.1, lambda: hang_at_start(job, rng))
        return
    worker = rng.choice(found)
    job.world.trace(f"{worker.name} hangs for good as it starts")
    job.hung += 1
    worker.hung = True


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
    for _ in range(rng.choice((1, 1, 2))):
        at += 12 * rng.random()
        job.world.at(at, lambda: hang(job, rng))
    if seed % 4 < 2:
        job.world.at(at, lambda: hang_at_start(job, Random(f"{_SEED} {seed}")))
    if seed % 4 == 2:
        job.world.at(at, lambda: stop_standbys(job))
    return job.run(max(last, at + 1.0) + 15 * rng.random())

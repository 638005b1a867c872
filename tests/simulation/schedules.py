"""From a seed to a job with its faults, and what becomes of it."""

from __future__ import annotations

import logging
from random import Random

from .faults import schedule
from .job import Outcome, Shape, SimJob
from .world import Violation, World

SHAPES = (
    Shape(2),
    Shape(2),
    Shape(2, spares=1),
    Shape(3, spares=1),
    Shape(2, per_node=2),
    Shape(2, per_node=2, spares=1),
    Shape(3, policy="shrink", groups=3),
    Shape(2, per_node=2, policy="shrink", groups=2),
    Shape(3, policy="shrink", groups=3, adopts=True),
)


def simulate(seed: int, world: World | None = None) -> Outcome:
    """Run one schedule. Raises Violation."""
    rng = Random(seed)
    job = SimJob(world or World(seed), rng.choice(SHAPES))
    return job.run(schedule(job, rng))


def repeat(seed: int) -> int:
    """One schedule, printed."""
    logging.basicConfig(level=logging.INFO, format="             %(message)s")
    world = World(seed, trace=True)
    try:
        outcome = simulate(seed, world)
        said = f"{outcome}"
    except Violation as violation:
        said = f"VIOLATION {violation}"
    finally:
        print("\n".join(world.lines or []))
    print(said)
    return 0 if said.startswith("Outcome") else 1

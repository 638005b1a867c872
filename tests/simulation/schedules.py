"""From a seed to a job with its faults, and what becomes of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from random import Random

from .faults import schedule
from .invariants import Violation
from .job import Outcome, Shape, SimJob
from .world import World

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


def shape(rng: Random) -> Shape:
    """Of a job: its nodes, and what its script does."""
    found = rng.choice(SHAPES)
    if rng.random() < 0.4:
        found = replace(found, durable=rng.choice((1, 2, 3)), former=rng.choice((0, 0, 4)))
    if rng.random() < 0.3:
        found = replace(found, saves=rng.choice((2, 3)), loads=rng.choice(("all", "each")))
    if rng.random() < 0.3:
        found = replace(found, brings=rng.choice(("same",) * 8 + ("different", "impossible")))
    if rng.random() < 0.2:
        found = replace(found, part=found.former + rng.choice((1, 3, 6)))
    return found


READY = 25 * 10**7
"""Of each half of these ranges, in the second half standbys start roles ahead of need."""
DRAINS = 5 * 10**8
"""Of each of these ranges, from so far in nodes are drained in the second half."""
DERIVES = 125 * 10**6
"""Of each quarter, in the second half nothing is copied that all roles together derive."""
LADDER = 11 * 10**7
"""Of each of these eighths, from so far in a job does not end where it cannot go on in place: its roles begin
anew, and its script may never do the same again."""
NOTICED = 9 * 10**7
"""Of each of these eighths, from so far in, and up to that, nodes are drained since their machines
are about to go; and then they go."""
SICK = 85 * 10**6
"""Of each of these eighths, from so far in, and up to that, devices report errors, and workers die of it."""
SLOWS = 81 * 10**6
"""Of each of these eighths, from so far in, and up to that, roles are slow, and moved for it."""
CHECKED = 82 * 10**6
"""Of each of these eighths, from so far in, and up to that, who joins is checked, and may be sick."""
RELAYS = 10**9
"""Seeds from this on, or as far below 0, are of jobs in which some nodes speak for others."""
EVERY = 2 * 10**9
"""From this on, counted from here, they are of jobs in which not each version is protected."""
VERIFIES = 2 * EVERY
"""From this on, counted as of that, what roles hold alike is compared."""
FLIPS = 3 * EVERY
"""From this on, bits of that flip."""


def simulate(seed: int, world: World | None = None) -> Outcome:
    """Run one schedule. Raises Violation. A negative seed is of a job whose leader is elected."""
    rng = Random(seed)
    size = abs(seed) % EVERY
    drains, ready = size % RELAYS >= DRAINS, abs(seed) % DRAINS >= READY
    drains &= seed >= 0 or abs(seed) < FLIPS  # or a leader goes, and nobody compares until the next one leads
    found = replace(shape(rng), elects=seed < 0, relays=size >= RELAYS, drains=drains, ready=ready)
    found = replace(found, derives=abs(seed) % READY >= DERIVES and (found.groups == 1 or found.adopts))
    if abs(seed) % DERIVES >= LADDER:
        found = replace(found, restarts=1 + abs(seed) % 3)
    if abs(seed) >= VERIFIES:
        found = replace(found, verifies=True, flips=abs(seed) >= FLIPS)
    if (
        EVERY <= abs(seed) < VERIFIES or (VERIFIES <= abs(seed) < FLIPS and seed % 2)
    ) and found.policy != "shrink":
        every = 2 + size % 8
        found = replace(found, every=every) if every < 9 else replace(found, slow=True)
    if drains:
        found = replace(found, spares=found.spares + rng.choice((0, 1, 1, 2)))
        within = abs(seed) % DERIVES
        found = replace(found, checks=CHECKED <= within < SICK)
        found = replace(found, notices=NOTICED <= within < LADDER, sick=SICK <= within < NOTICED)
        found = replace(found, slows=SLOWS <= within < CHECKED)
    job = SimJob(world or World(seed), found)
    return job.run(schedule(job, rng))


_SMALL = Shape(2), Shape(2), Shape(2), Shape(2, spares=1)

_WHOLE = 8
"""One of so many is seen to train again in the end. What else is checked of it is checked at all times."""


def simulate_leaders(seed: int, world: World | None = None) -> Outcome:
    """A short one, of a small job whose leaders fail. Raises Violation."""
    rng = Random(seed)
    found = replace(rng.choice(_SMALL), elects=True, brief=True, cut_short=bool(seed % _WHOLE))
    job = SimJob(world or World(seed), found)
    return job.run(schedule(job, rng))


def repeat(seed: int, leaders: bool = False) -> int:
    """One schedule, printed."""
    logging.basicConfig(level=logging.INFO, format="             %(message)s")
    world = World(seed, trace=True)
    try:
        outcome = (simulate_leaders if leaders else simulate)(seed, world)
        said = f"{outcome}"
    except Violation as violation:
        said = f"VIOLATION {violation}"
    finally:
        print("\n".join(world.lines or []))
    print(said)
    return 0 if said.startswith("Outcome") else 1

"""What must be true of a job whatever fails: each invariant with its number, its name, and what it says.

The simulator checks them after every event, or at a schedule's end. What upholds one in `ft_core` cites it.
"""

from __future__ import annotations

from enum import Enum


class Violation(AssertionError):  # noqa: N818
    """An invariant does not hold."""


class Invariant(Enum):
    """All of them. What has a number keeps it."""

    ONE_WORKER = 1, "no role has two workers that count"
    EPOCH_ORDER = 2, "no epoch begins after a newer one, and nobody takes part in another than its own"
    ONE_PAST = 3, "all roles of an epoch go on from one version, and have of it what its past has made"
    NOTHING_LOST = 4, "while copies cover what was lost, no more finished steps are done again than that"
    SAMPLES = 5, "every sample is trained once in the past that counts, and the ledger says so"
    GOES_ON = 6, "some time after the last fault the job has done steps, and then it ends"
    ENDS = 7, "a job ends well when all is done, and else where no restart could help, with the reason"
    WELL = 8, "no node is lost that is well, that others reach, or that was stopped for less than 2 s"
    LINKS = 9, "of a broken link one end is replaced, and none that holds what nobody else does"
    RETURN = 10, "nodes that are well come back, and replica groups"
    DURABLE = 11, "a durable checkpoint is of one past, and is gone on from only when it is complete"
    NEWEST = (
        12,
        "of what is complete and what is in memory the job goes on from the newer, but for those steps",
    )
    SETTINGS = 13, "all roles train with the same settings, and none with different or impossible ones"
    PARTS = 14, "a part of the script that is over has all its steps behind it"
    EVENTS = 15, "what an event says all roles have done, each has done in its epoch"
    ONE_LEADER = 16, "no two leaders both decide, and nobody obeys the older one"
    TIME = 17, "every second is accounted for once, by all controllers in turn and by the events alone"
    PREDECESSORS = 18, "who takes a role over knows of all workers whose devices and ports are not free yet"
    ANEW = 19, "roles begin anew only where a job would have ended"
    BLAME = 20, "nobody is replaced for a hang who is well"
    TRIES = 21, "an error that comes again in the same step is tried as often as is said, and no more"
    PLACES = 22, "a role stays where it was if it can, and moves to where little has failed"
    DRAINS = 23, "a drain moves roles between two steps, to nodes that stay, does no step again, and ends"
    PHASES = 24, "a machine goes from phase to phase as its table says: it raises by itself"
    SAVED = 25, "a job that ends leaves the newest version that its nodes hold on storage, or says why not"
    SLOW = (
        26,
        "who is slow is named, and nobody else; its node is taken out where there is a better one, and no "
        "machine and no role moves for that twice in an hour",
    )
    ADMITTED = 27, "no node is given a role that is known to be sick, while another is there, or under check"

    @property
    def number(self) -> str:
        """By which code and violations cite it."""
        return f"INV-{self.value[0]}"

    @property
    def label(self) -> str:
        """Its name."""
        return self.name.lower().replace("_", " ")

    @property
    def sentence(self) -> str:
        """What it says."""
        return self.value[1]

    def broken(self, found: str) -> Violation:
        """It does not hold: what was found."""
        return Violation(f"{self.number} ({self.label}): {found}")

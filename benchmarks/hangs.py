"""`python -m benchmarks.hangs --count N --real N --seed S`: injected hangs, and how many are explained.

`--count`: simulated roles (`hangs_simulated`), so it says what the analysis is worth, and nothing of how
records are made or of time. `--real`: processes with process groups over gloo (`hangs_real`), one to three
seconds each. With gloo an operation of another size ends a peer's process, so most of those do not hang: they
are counted apart. The last line: `N hangs, F failed`, those whose culprit is not among the named roles, or
where another is certain.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator

from benchmarks import hangs_real
from benchmarks.hangs_simulated import Fault, Layout, hang
from ft_core.control.liveness.hangs.finding import Case
from ft_core.protocol.flight import FlightLog


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hangs", description=__doc__)
    parser.add_argument("--count", type=int, help="simulated ones; 300 if there are to be no real ones")
    parser.add_argument("--real", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    args = parser.parse_args()
    count = args.count if args.count is not None else 0 if args.real else 300
    tally, others = Tally(), Counter[str]()
    for seed, layout, fault, logs in itertools.islice(_simulated(args.seed), count):
        tally.add(f"seed {seed}", layout, fault, logs)
    for seed in range(args.seed, args.seed + args.real):
        layout, fault = hangs_real.drawn(seed)
        outcome = hangs_real.run(layout, fault)
        if outcome.what == "hung":
            tally.add(f"real seed {seed}", layout, fault, outcome.logs)
        else:
            others[f"{fault.kind}: {outcome.what}"] += 1
    tally.show()
    for what, times in sorted(others.items()):
        print(f"{what}, {times} times: not a hang")
    print(f"{tally.total.total()} hangs, {tally.failed} failed")
    return 1 if tally.failed else 0


def _simulated(first: int) -> Iterator[tuple[int, Layout, Fault, list[FlightLog]]]:
    for seed in itertools.count(first):
        if (drawn := hang(seed)) is not None:  # else nothing hangs of it
            yield seed, *drawn


class Tally:
    """How many were explained, by kind."""

    def __init__(self) -> None:
        self.total, self.right, self.named = Counter[str](), Counter[str](), Counter[str]()
        self.failed = 0

    def add(self, what: str, layout: Layout, fault: Fault, logs: list[FlightLog]) -> None:
        """One more. Says so where it is not explained rightly."""
        found = Case(logs, {role: f"node{role // 4}" for role in range(layout.roles)}).explain()
        self.total[fault.kind] += 1
        self.right[fault.kind] += found is not None and found.culprits == (fault.role,)
        is_named = found is not None and fault.role in found.roles
        self.named[fault.kind] += is_named
        if not is_named or (found is not None and set(found.culprits) - {fault.role}):
            self.failed += 1
            print(f"{what}: {fault} in {layout}: {found}")

    def show(self) -> None:
        """A line for each kind."""
        every = self.total.total()
        rows = [(kind, self.total[kind], self.right[kind], self.named[kind]) for kind in sorted(self.total)]
        for kind, count, right, named in [*rows, ("all", every, self.right.total(), self.named.total())]:
            if count:
                print(f"{kind:10} {count:5}  culprit {right / count:6.1%}  among three {named / count:6.1%}")


if __name__ == "__main__":
    sys.exit(main())

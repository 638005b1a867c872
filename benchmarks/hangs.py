"""`python -m benchmarks.hangs --count N --seed S`: injected hangs, and how many of them are explained.

Simulated roles (`hangs_simulated`), so it says what the analysis is worth, and nothing of how records are
made or of time. The last line: `N hangs, F failed`, those whose culprit is not among the named roles, or
another of which is certain.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter

from benchmarks.hangs_simulated import hang
from ft_core.control.hangs.finding import Case


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hangs", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    args = parser.parse_args()
    total, right, named, failed = Counter[str](), Counter[str](), Counter[str](), 0
    for seed in itertools.count(args.seed):
        if total.total() == args.count:
            break
        if (drawn := hang(seed)) is None:
            continue  # nothing hangs of it
        layout, fault, logs = drawn
        found = Case(logs, {role: f"node{role // 4}" for role in range(layout.roles)}).explain()
        total[fault.kind] += 1
        right[fault.kind] += found is not None and found.culprits == (fault.role,)
        is_named = found is not None and fault.role in found.roles
        named[fault.kind] += is_named
        if not is_named or (found is not None and set(found.culprits) - {fault.role}):
            failed += 1
            print(f"seed {seed}: {fault} in {layout}: {found}")
    every = total.total()
    rows = [(kind, total[kind], right[kind], named[kind]) for kind in sorted(total)]
    for kind, count, certain, among in [*rows, ("all", every, right.total(), named.total())]:
        print(f"{kind:10} {count:5}  culprit {certain / count:6.1%}  among three {among / count:6.1%}")
    print(f"{every} hangs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The odds that memory alone brings a job back (FFTrainer, section 6.2, and DeadPool, section V-C)."""

from __future__ import annotations

import math
from collections.abc import Mapping


def ring_survival(nodes: int, failed: int, replicas: int = 1) -> float:
    """FFTrainer's equation 3: the chance that memory suffices when exactly `failed` of `nodes` nodes fail.

    Nodes form a ring and each keeps a copy of its `replicas` predecessors, so state is lost if and only if
    replicas + 1 neighbours fail together. For one replica this is N / (N - n) C(N - n, n) / C(N, n).
    """
    left = nodes - failed
    if left <= 0:
        return float(failed == 0)
    run = replicas + 1
    # The failed nodes, dealt into the gaps behind the living ones, at most `replicas` to a gap ...
    ways = sum(
        (-1) ** j * math.comb(left, j) * math.comb(failed - j * run + left - 1, left - 1)
        for j in range(min(left, failed // run) + 1)
    )
    # ... and turned around the ring.
    return nodes * ways / (left * math.comb(nodes, failed))


def recovery_probability(
    nodes: int, devices_per_node: int, mtbf_hours: float, hours: float, replicas: int = 1
) -> float:
    """FFTrainer's equations 4 and 5: the chance that memory suffices for all that fails in `hours`.

    Nothing is repaired or copied anew meanwhile, which is far worse than what the engine does.
    `mtbf_hours` is one device's; a node is lost with any of its devices.
    """
    lost = -math.expm1(-devices_per_node * hours / mtbf_hours)
    if lost >= 1:
        return ring_survival(nodes, nodes, replicas)
    total = 0.0
    for failed in range(nodes + 1):
        log = math.lgamma(nodes + 1) - math.lgamma(failed + 1) - math.lgamma(nodes - failed + 1)
        log += failed * math.log(lost) + (nodes - failed) * math.log1p(-lost)
        if log < -50 and failed > nodes * lost:
            break
        total += math.exp(log) * ring_survival(nodes, failed, replicas)
    return min(1.0, total)


def failure_probability(devices: int, mtbf_hours: float, seconds: float) -> float:
    """The chance that any of `devices` fails within `seconds`."""
    return -math.expm1(-devices * seconds / 3600 / mtbf_hours)


def loss_bound(copies: Mapping[int, int], domain_failure: float) -> float:
    """DeadPool's union bound: the sum over all segments of p^copies, D p^(k+1) if D segments have k + 1
    copies.

    `copies`: number of domains -> segments that are in so many. `domain_failure`: the chance that a domain
    is lost in the time until lost copies are made again (about a step); the bound is for one such time.
    """
    return min(1.0, sum(count * domain_failure**domains for domains, count in copies.items()))

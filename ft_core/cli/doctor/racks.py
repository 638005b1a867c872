"""Checks of `ftctl doctor` on failure domains: where this machine is, and what a rack's loss would cost."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from ft_core.cli import failure_domains
from ft_core.cli.doctor.case import Case, Check
from ft_core.errors import ConfigError
from ft_core.node.admission.findings import Finding, fail, ok, warn
from ft_core.state.domains import NestedDomains

_ADVICE = (
    "give --ft-domain, or --ft-domain-from with a file or a command that says it; or have Slurm's topology "
    "plugin, or the labels of the Kubernetes node in the pod, say it (docs/operations.md)"
)


def here(case: Case) -> Iterator[Finding]:
    """Something says in which rack this machine is, so that copies can be in another."""
    if case.standalone:
        return
    try:
        found = failure_domains.find(case.domain, case.domain_from, case.environment, case.root)
    except ConfigError as error:
        yield fail("failure domain", str(error), "ftrun would refuse to start; correct this")
        return
    if found.trouble:
        yield warn("failure domain", found.trouble, "look for errors of the GPUs: nvidia-smi, dmesg")
    elif found.source:
        yield ok("failure domain", f"{found.of(socket.gethostname())}, from {found.source}")
    elif case.several_nodes:
        what = (
            "nothing says in which rack this machine is: copies go to other nodes, perhaps of the same rack"
        )
        yield warn("failure domain", what, _ADVICE)


def lost(
    nested: NestedDomains,
    held: Mapping[int, list[set[str]]],
    roles: Mapping[int, str],
    idle: Mapping[str, int],
) -> Iterator[Finding]:
    """What the loss of a whole rack of a running job would cost. `held`: of roles that were looked at, for
    each part of the state the nodes that have it; `idle`: workers of spares."""
    for level in range(nested.levels - 1):
        domains = nested.domains(level)
        at_risk = {
            next(iter(there))
            for parts in held.values()
            for nodes in parts
            if len(there := {nested.at(node, level) for node in nodes}) == 1
        }
        narrowest = level == nested.levels - 2
        if at_risk and not narrowest:
            continue  # of what is narrower it may be otherwise
        name = max(domains, key=lambda domain: (domain in at_risk, len(domains[domain]), domain))
        gone = set(domains[name])
        lost_roles = sum(node in gone for node in roles.values())
        free = sum(count for node, count in idle.items() if nested.at(node, level) != name)
        cost = f"the loss of {name} ({len(gone)} nodes, {lost_roles} roles)"
        if at_risk:
            others = f"; so would that of {len(at_risk) - 1} others" * (len(at_risk) > 1)
            yield warn(
                "rack loss",
                f"{cost} would take all copies of a part of the state{others}",
                "have nodes of other racks take part, or stand by; until then only a durable checkpoint "
                "survives it (--ft-durable-dir)",
            )
        elif free < lost_roles:
            yield warn(
                "rack loss",
                f"{cost} leaves the state in memory elsewhere, and idle workers for {free} of the roles",
                "have as many spare nodes in other racks as the largest has nodes: the job would wait for "
                "them, or go on with fewer replica groups (--ft-policy shrink)",
            )
        else:
            yield ok("rack loss", f"{cost}, or of any other of {len(domains)}, costs a recovery from memory")
        return


CHECKS: tuple[Check, ...] = (here,)

"""Checks of `ftctl doctor` on a running job: what the next failure would find."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Container, Iterator, Mapping

from ft_core.cli.doctor import racks
from ft_core.cli.doctor.case import Case, Check
from ft_core.errors import FtError
from ft_core.node.admission.findings import Finding, fail, judge, ok, warn
from ft_core.protocol.domains import domain_of
from ft_core.protocol.messages import (
    NAMED,
    Denied,
    DescribeRole,
    NodeAddress,
    RoleDescribed,
    RoleState,
    RoleStatus,
    ToCtl,
)
from ft_core.protocol.sockets import split_address
from ft_core.protocol.table import placed
from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, spares_of, survives

_REACH = 3.0
LOOKED_AT = 64
"""Roles, and nodes, of all that there are."""
_CALM = ("forming", "running", "done")
"""Phases in which nobody waits for anything."""


def controller(case: Case) -> Iterator[Finding]:
    """It answers, and the job is not held up."""
    if case.silence:
        over = _last_event(case)
        if over in ("finished", "stopped"):
            yield ok("controller", f"the job is over ({over})")
        else:
            yield fail(
                "controller",
                f"no answer from {case.controller}: {case.silence}",
                "is ftrun of node rank 0 alive? It restarts the controller. Until then training goes on, and "
                "no failure is repaired",
            )
    if case.status is None:
        return
    phase = case.status.phase
    advice = (
        f"the newest `reason` in {case.job_dir or 'the job directory'}/events.jsonl says what it waits for"
    )
    found = f"epoch {case.status.epoch}, {phase}"
    yield judge("controller", found, advice, bad=phase not in _CALM, fatal=phase == "waiting")


def _last_event(case: Case) -> str:
    if case.job_dir is None:
        return ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (case.job_dir / "events.jsonl").read_text().splitlines()
        return str(json.loads(lines[-1])["event"])
    return ""


def spares(case: Case) -> Iterator[Finding]:
    """Somebody is there to take a lost node's roles."""
    if case.status is None or case.settings is None:
        return
    status = case.status
    found = f"{status.spares_ready:,} of {status.spares:,} spare nodes have their workers up"
    advice = f"ftrun --join {case.controller} on a free machine: without a spare a lost node is waited for"
    yield judge("spares", found, advice, bad=not status.spares_ready)


def replicas(case: Case) -> Iterator[Finding]:
    """Every segment has complete copies in k + 1 failure domains right now; and the agents can be reached.
    Of many roles some are looked at."""
    if case.status is None or case.line is None or case.settings is None or not case.status.roles:
        return
    if case.status.unprotected:
        return  # there are none
    k, every = case.settings.replicas, -(-case.status.roles // LOOKED_AT)
    few: list[str] = []
    try:
        with case.line() as found:
            rows, alive = [], set[str]()
            for number, row in enumerate(found.roles()):
                alive |= {row.node} if row.agent_pid is not None else set()
                rows += [row] * (number % every == 0)
            idle = {spare.node: spare.idle for spare in found.spares()}
            alive |= idle.keys()
            roles, nodes = placed(found.hosts())
            answers: dict[int, ToCtl] = {}
            refused: list[str] = []
            for answer in found.ask_all(DescribeRole(row.role) for row in rows):
                if isinstance(answer, RoleDescribed):
                    answers[answer.state.role] = answer
                elif isinstance(answer, Denied):
                    refused.append(answer.error)
    except (FtError, OSError) as error:
        yield fail("replicas", f"the controller did not say: {error}", "try again")
        return
    domains = len(_domains(nodes))
    least = case.status.roles
    held: dict[int, list[set[str]]] = {}
    for row in rows:
        if not isinstance(described := answers.get(row.role), RoleDescribed):
            why = next((each for each in refused if f"role {row.role} " in f"{each} "), "no answer")
            few.append(f"role {row.role}: {why}")
            continue
        held[row.role] = _held(row, described.state, roles, alive & nodes.keys())
        copies = _copies(row, described.state, roles, nodes, alive)
        if copies < min(k, domains - 1):
            few.append(f"role {row.role} on {row.node}")
        least = min(least, copies)
    of_some = f" (of {len(rows)} of the {case.status.roles:,} roles)" if every > 1 else ""
    if few:
        yield fail(
            "replicas",
            f"{len(few)} roles have too few copies for {k} lost failure domains{of_some}: "
            f"{'; '.join(few[:3])}",
            "if training has begun and it stays so: look for `not replicated` in the console, and for "
            "domains that are really one (--ft-domain)",
        )
    elif domains <= k:
        found_domains = f"there are {domains} failure domain(s) only, and k is {k}"
        yield warn("replicas", found_domains, "use more nodes, spares, or truthful --ft-domain labels")
    else:
        text = f"verified copies suffice after the loss of any {least} failure domain(s){of_some}"
        yield ok("replicas", text)
    labels = {node: about.domain for node, about in nodes.items()}
    nested = Places(roles, labels, spares_of(nodes, roles)).nested
    if nested is not None and k and not few:
        ready = {node: count for node, count in idle.items() if node in nodes}
        yield from racks.lost(nested, held, roles, ready)
    yield from _reachable({name: nodes[name] for name in _some(nodes, alive)}, len(alive))


def _some(nodes: Mapping[str, NodeAddress], alive: Container[str]) -> list[str]:
    """Those that are there; of many, some."""
    found = [name for name in nodes if name in alive]
    return found[:: -(-len(found) // LOOKED_AT) or 1]


def _domains(nodes: Mapping[str, NodeAddress]) -> set[str]:
    """Those that may hold copies."""
    domains = {node: about.domain for node, about in nodes.items()}
    return {domain_of(node, domains) for node in domains}


def _copies(
    row: RoleStatus,
    state: RoleState,
    places: Mapping[int, str],
    nodes: Mapping[str, NodeAddress],
    alive: Container[str],
) -> int:
    """How many failure domains may be lost, judging by the role's worst segment; -1 before training."""
    domains = {node: about.domain for node, about in nodes.items()}
    roles = {role: node for role, node in places.items() if node in alive}
    worst = len({domain_of(node, domains) for node in domains if node in alive})
    segments = [Segment.of(layout) for layout in state.segments]
    for segment in segments:
        holding = [node for node, versions in row.replicas.get(segment.id, {}).items() if versions]
        worst = min(worst, survives(segment, roles, domains, holding))
    return worst if segments and row.held else -1


def _held(
    row: RoleStatus, state: RoleState, places: Mapping[int, str], alive: Container[str]
) -> list[set[str]]:
    """The nodes that have each part of the role's state."""
    found = []
    for segment in map(Segment.of, state.segments):
        own = {places[role] for role in segment.holders if role in places}
        kept = {node for node, versions in row.replicas.get(segment.id, {}).items() if versions}
        found.append({node for node in own | kept if node in alive})
    return [nodes for nodes in found if nodes]


def _reachable(nodes: Mapping[str, NodeAddress], of: int) -> Iterator[Finding]:
    """From here: the machine on which a firewall is wrong is not always the first. `of`: nodes in all."""
    deaf = []
    for node, about in nodes.items():
        for way in about.data.split(","):
            try:
                socket.create_connection(split_address(way), timeout=_REACH).close()
            except OSError as error:
                deaf.append(f"{node} at {way}: {error}")
    advice = "let the nodes reach each other on all ephemeral ports; state comes from there in a recovery"
    all_answer = f"all {of} answer" if len(nodes) == of else f"{len(nodes)} of {of:,} were asked, and answer"
    found = "; ".join(deaf[:NAMED]) + f" and {len(deaf) - NAMED} others" * (len(deaf) > NAMED)
    found = found if deaf else all_answer
    yield judge("agents", found, advice, bad=bool(deaf), fatal=bool(deaf))


CHECKS: tuple[Check, ...] = (controller, spares, replicas)

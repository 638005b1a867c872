"""How many files and connections a process may have open: as many as the system allows."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

MAX_GUESTS = 256
"""Connections to a process that may be in the handshake at once."""
REMEDY = "raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd, `docker run --ulimit nofile=...`)"

_ENOUGH = 1 << 20
"""Files: some programs go through all numbers up to the limit, and that may be a billion."""
_OWN = 128
"""Files and connections that a process has by itself."""
_PER_WORKER = 32
"""Files of an agent for each worker: snapshots and replicas in memory, logs, connections to other agents."""


def raise_limit() -> int:
    """Let this process, and those that it starts, open as many files as the system allows: how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def check_limit(who: str, nodes: int, roles: int, roles_per_node: int) -> None:
    """Raise the limit, and say so if it does not suffice for a job of so many nodes (with spares) and roles.

    The hungriest are the controller, to which all nodes connect, again before the end of the last connection
    was seen, and the agent of role 0, to which all workers do, in two epochs for a moment.
    """
    limit = raise_limit()
    needed = _OWN + MAX_GUESTS + max(nodes + nodes // 8, 2 * roles + _PER_WORKER * (roles_per_node + 1))
    if limit < needed:
        log.warning(
            "%s may have %d files and connections open, and may need %d with %d roles on %d nodes. When they "
            "run out, nodes and workers wait for each other: %s",
            *(who, limit, needed, roles, nodes, REMEDY),
        )

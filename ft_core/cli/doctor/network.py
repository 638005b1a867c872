"""Checks of `ftctl doctor` on names, ports, the clock and directories: what nodes need of each other."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ft_core.cli.doctor.case import Case, Check
from ft_core.errors import ConfigError
from ft_core.net import interfaces
from ft_core.node.admission.findings import Finding, fail, judge, ok, warn
from ft_core.protocol.pulses import receiver
from ft_core.protocol.sockets import addresses_of, listen, split_address
from ft_core.settings import SECRET_ADVICE, SECRET_ENV

_SLOW = 1.0
"""Seconds from which on a look-up is a nuisance: recoveries take about one."""
_REACH = 3.0
_PORTS = 1000
_TIME_ERROR = 5
"""What adjtimex returns while nothing disciplines the clock."""
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "cifs", "smb", "weka", "panfs", "pvfs")
"""Kinds of file systems that several machines can see begin so."""


def names(case: Case) -> Iterator[Finding]:
    """Look-ups take no time. What address this machine's own name has does not matter: communicators of gloo
    listen on that by which the machine reaches the others."""
    own = socket.gethostname()
    try:
        address = addresses_of(own)[0]
    except OSError:
        yield ok("own name", f"{own} has no address here, and needs none")
        return
    yield ok("own name", f"{own} is {address}")
    _, seconds = _timed(lambda: socket.gethostbyaddr(address)[0])
    advice = (
        "put it into /etc/hosts, or export RES_OPTIONS='timeout:1 attempts:1': torch asks at each connection "
        "to a store. Agents and workers have this turned off, other processes have not"
    )
    found = f"asking for the name of {address} took {seconds:.1f} s"
    yield judge("reverse look-up", found, advice, bad=seconds > _SLOW)


def ports(case: Case) -> Iterator[Finding]:
    """The controller's address can be listened on, or reached; the agents have ports to choose from."""
    low, high = map(int, (case.root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    advice = (
        f"allow {_PORTS} or more (sysctl net.ipv4.ip_local_port_range): agents, stores and communicators "
        "listen on ports of this range, new ones in each recovery"
    )
    found = f"ephemeral {low} to {high}; they must be open between the nodes"
    yield judge("ports", found, advice, bad=high - low < _PORTS)
    if not case.controller or case.standalone or case.status is not None:
        return
    try:
        host, port = split_address(case.controller)
        address = addresses_of(host)[0]
    except (ValueError, OSError) as error:
        advice = "give HOST:PORT of node rank 0, with a name that all nodes know"
        yield fail("controller's address", f"{case.controller}: {error}", advice)
        return
    if host in ("localhost", address) and ipaddress.ip_address(address).is_loopback and case.several_nodes:
        yield fail(
            "controller's address",
            f"{host} is {address} here",
            "give a name or an address that the other nodes can reach",
        )
    elif low <= port <= high:
        yield warn(
            "controller's address",
            f"port {port} is an ephemeral one",
            f"take one below {low}: any connection may get it while the controller is down, which then "
            "cannot be restarted",
        )
    else:
        yield from _controller(host, address, port)


def _controller(host: str, address: str, port: int) -> Iterator[Finding]:
    try:
        with listen(address, port), receiver(address, port):
            yield ok("controller's address", f"port {port} is free on {host}, which is this machine")
        return
    except OSError as error:
        mine = error.errno != 99  # EADDRNOTAVAIL: another machine's
        reason = str(error)
    if mine:
        advice = "take another port: something listens there that is no controller of this job"
        yield fail("controller's address", f"port {port} of {host}: {reason}", advice)
        return
    try:
        socket.create_connection((address, port), timeout=_REACH).close()
        yield ok("controller's address", f"{host}:{port} answers")
    except ConnectionRefusedError:
        yield ok("controller's address", f"{host} is there; nobody listens on port {port} yet")
    except OSError as error:
        advice = "a firewall, or the wrong name: every node must reach it"
        yield fail("controller's address", f"{host}:{port}: {error}", advice)


def interface(case: Case) -> Iterator[Finding]:
    """Agents can serve state where they were told to; and where that is."""
    if not case.several_nodes or case.settings is None:
        return
    try:
        found = interfaces.chosen(case.settings.interfaces, case.controller)
    except ConfigError as error:
        yield fail("data interface", str(error), "ftrun would refuse to start; correct this")
        return
    where = ", ".join(map(str, found))
    if any(each.kind == "loopback" for each in found):
        advice = "give --rdzv-endpoint an address, or --ft-interface an interface, that other nodes reach"
        yield fail("data interface", f"state would be served on {where}", advice)
    elif found:
        yield ok("data interface", f"state is served on {where}")


def clock(case: Case) -> Iterator[Finding]:
    """The engine compares no two nodes' clocks; whoever reads their logs side by side does."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(512))  # modes 0: asks only
    unsynchronised = state == _TIME_ERROR
    known = "synchronised" if state >= 0 else "the kernel does not say"  # a sandbox may forbid the call
    advice = (
        "start chrony or ntpd on the host: recoveries do not need it, but the times in the nodes' logs "
        "cannot be compared"
    )
    yield judge("clock", "not synchronised" if unsynchronised else known, advice, bad=unsynchronised)


def directories(case: Case) -> Iterator[Finding]:
    """The job directory can be used, and durable checkpoints are where all nodes see them."""
    job_dir = case.job_dir
    if job_dir is not None:
        trouble = _unwritable(job_dir)
        used = case.status is None and (job_dir / "events.jsonl").exists() and bool(case.launcher)
        secret = job_dir / "secret"
        if trouble:
            yield fail("job directory", f"{job_dir}: {trouble}", "give --job-dir a place that can be written")
        elif used:
            advice = "give a new --job-dir: each job, and each start of it, has its own"
            yield fail("job directory", f"{job_dir} is the directory of an earlier job", advice)
        elif secret.exists() and stat.S_IMODE(secret.stat().st_mode) & 0o077:
            advice = f"chmod 600 {secret}: who reads it may do anything to the job"
            yield warn("job directory", f"{secret} can be read by others", advice)
        else:
            yield ok("job directory", str(job_dir))
    durable = case.settings.durable_dir if case.settings is not None else ""
    if not durable:
        return
    kind = _file_system(case.root, Path(durable))
    if trouble := _unwritable(Path(durable)):
        yield fail("durable checkpoints", f"{durable}: {trouble}", "give a directory that can be written")
    elif kind == "tmpfs" or (case.several_nodes and not kind.startswith(_NETWORK)):
        yield fail(
            "durable checkpoints",
            f"{durable} is on {kind} of this machine",
            "give --ft-durable-dir on storage that all nodes see: they are for the day on which more nodes "
            "are lost than memory covers, and only versions that every node can read count",
        )
    else:
        yield ok("durable checkpoints", f"{durable} ({kind})")


def secret(case: Case) -> Iterator[Finding]:
    """All nodes have the same, or they refuse each other."""
    if not case.several_nodes:
        return
    if case.environment.get(SECRET_ENV):
        yield ok("secret", f"{SECRET_ENV} is set; it must be the same on all nodes")
    elif case.job_dir is not None and (case.job_dir / "secret").exists():
        yield ok("secret", f"in {case.job_dir / 'secret'}, which all nodes must see")
    elif case.job_dir is not None:
        found = (
            f"{SECRET_ENV} is not set: each node draws one, where {case.job_dir} is not one directory for all"
        )
        yield warn("secret", found, SECRET_ADVICE)
    else:
        yield fail("secret", f"{SECRET_ENV} is not set", SECRET_ADVICE)


def _timed(look_up: object) -> tuple[str, float]:
    assert callable(look_up)
    began = time.monotonic()
    try:
        answer = str(look_up())
    except OSError:
        answer = ""
    return answer, time.monotonic() - began


def _unwritable(path: Path) -> str:
    """Why nothing can be written to `path`, which may have to be made first."""
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return f"{path} is no directory"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} is not writable"


def _file_system(root: Path, path: Path) -> str:
    """The kind of file system that `path` is on."""
    found, longest = "", -1
    for line in (root / "proc/self/mounts").read_text().splitlines():
        _, place, kind = line.split()[:3]
        if path.resolve().is_relative_to(place) and len(place) > longest:
            found, longest = kind, len(place)
    return found


CHECKS: tuple[Check, ...] = (names, ports, interface, clock, directories, secret)

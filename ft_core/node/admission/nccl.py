"""Whether NCCL, as it is installed and told here, lets a recovery work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ft_core.comm import nccl_environment
from ft_core.node.admission.findings import Finding, Machine, fail, ok, warn

_NCCL_WITHOUT_ABORT = (
    ((2, 25, 1), (2, 25, 1), fail, "aborting a communicator hangs"),
    ((2, 28, 3), (2, 28, 8), fail, "aborting a communicator hangs"),
    ((2, 31, 2), (2, 31, 2), warn, "aborting a communicator hangs where another member destroys it"),
)
"""First and last version, how bad it is, and what is wrong."""
_TEARS_DOWN = ("1", "3")
"""TORCH_NCCL_ASYNC_ERROR_HANDLING with which torch's watchdog ends the process. 3 is torch's default."""


def nccl_version(machine: Machine) -> Iterator[Finding]:
    """A recovery begins by aborting communicators: NCCL's must not hang in that."""
    if (text := machine.versions.get("nccl")) is None:
        return
    version = tuple(map(int, re.findall(r"\d+", text)[:3]))
    for low, high, bad, what in _NCCL_WITHOUT_ABORT:
        if low <= version <= high:
            advice = f"use another: in it {what}, and a recovery begins by aborting all of them"
            yield bad("version of nccl", text, advice)
            return
    yield ok("version of nccl", text)


def nccl_errors(machine: Machine) -> Iterator[Finding]:
    """torch's NCCL watchdog must not end a survivor before the controller's abort reaches it."""
    old, new = "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    name = new if new in machine.environment or old not in machine.environment else old
    value = machine.environment.get(name)
    if value is None and not machine.gpus:
        return
    if value is None:
        yield ok("nccl errors", f"{name} is not set: ftrun's workers get {nccl_environment.DEFAULTS[new]}")
        return
    found = f"{name}={value}"
    if value in _TEARS_DOWN:
        yield fail(
            "nccl errors",
            found,
            f"export {new}=0: else torch's watchdog ends each survivor that notices the loss of a peer, and "
            "one failure becomes one of every worker. The controller notices it without the watchdog",
        )
    elif value == "2":
        yield warn(
            "nccl errors",
            found,
            f"export {new}=0: with 2 torch drops a communicator by itself after a time-out, and what the "
            "collective has left in its tensors looks like a result",
        )
    else:
        yield ok("nccl errors", found)


def nccl_threads(machine: Machine) -> Iterator[Finding]:
    """Nor may they because of what else is set here; what is not, the agents set."""
    workers = {**machine.environment, **nccl_environment.completed(machine.environment)}
    for found, consequence in nccl_environment.ends_survivors(workers):
        yield fail("nccl threads", found, f"leave it out: {consequence}")


def interfaces(machine: Machine) -> Iterator[Finding]:
    """Interfaces that are named to NCCL and gloo exist: each recovery opens communicators on them anew."""
    here = {path.name for path in (machine.root / "sys/class/net").glob("*")}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = machine.environment.get(variable, "")
        if not text:
            continue
        prefixes = variable.startswith("NCCL") and "=" not in text[:2]
        exclude = variable.startswith("NCCL") and text[0] == "^"
        names = [name for name in text.lstrip("^=").split(",") if name]

        def matches(name: str, prefixes: bool = prefixes, names: list[str] = names) -> bool:
            return any(name.startswith(n) if prefixes else name == n for n in names)

        usable = sorted(name for name in here if name != "lo" and matches(name) != exclude)
        usable += ["lo"] * (not exclude and matches("lo"))
        if usable:
            yield ok("interfaces", f"{variable}={text}: {', '.join(usable)}")
        else:
            yield fail(
                "interfaces",
                f"{variable}={text}, but there are only {', '.join(sorted(here))}",
                "name one of these, or unset it. All nodes must be right, spares too: a spare opens "
                " its first communicators in the middle of a recovery",
            )

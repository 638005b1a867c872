"""What torchrun's users bring along: its flags that do nothing here, and the variables that it reads.

Each of its flags may come as a variable instead, `--nnodes` as PET_NNODES, which is how Kubeflow tells pods
what they are. A flag on the command line wins.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ft_core.errors import ConfigError

_RANK = ("SLURM_NODEID", "GROUP_RANK")
"""Where a node's number is found if neither `--node-rank` nor PET_NODE_RANK says it."""
_PLACE = {"nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf"} | {
    "master_addr",
    "master_port",
    "local_addr",
}
"""What says where in a job of several machines a node is: nothing of it is meant for `--standalone`."""


class _Idle(NamedTuple):
    name: str
    why: str
    choices: Sequence[str] | None = None
    switch: bool = False


_IDLE = (
    _Idle("rdzv-backend", "nodes meet at the job's controller"),
    _Idle("rdzv-conf", "nodes meet at the job's controller, and wait for each other for as long as it takes"),
    _Idle("monitor-interval", "the end of a worker is noticed at once"),
    _Idle(
        "start-method",
        "workers are forked from a process that has the script's imports done",
        ("spawn", "fork", "forkserver"),
    ),
    _Idle("event-log-handler", "what happens is in events.jsonl of the job directory"),
    _Idle("run-path", "scripts are run in that way anyway", switch=True),
    _Idle("local-addr", "a node has the address from which it reaches the controller"),
    _Idle("logs-specs", "workers' output is in the job directory"),
    _Idle("duplicate-stdout-filters", "all of workers' output is in the job directory, to be searched there"),
    _Idle("duplicate-stderr-filters", "all of workers' output is in the job directory, to be searched there"),
    _Idle("numa-binding", "workers are not bound to processors; start ftrun under numactl for that"),
    _Idle(
        "virtual-local-rank",
        "LOCAL_RANK is the number of a worker's device, and all devices are visible",
        switch=True,
    ),
)
_OF = {idle.name.replace("-", "_"): idle for idle in _IDLE}


def add_idle_flags(group: argparse._ArgumentGroup) -> None:
    """Those of torchrun's that are accepted, and do nothing."""
    for idle in _IDLE:
        spellings = dict.fromkeys((f"--{idle.name}", f"--{idle.name.replace('-', '_')}"))
        said = f"accepted, does nothing: {idle.why}"
        if idle.switch:
            group.add_argument(*spellings, action="store_true", help=said)
        else:
            group.add_argument(*spellings, default=None, choices=idle.choices, help=said)


def notes(args: argparse.Namespace) -> list[str]:
    """A line for each flag that was given and does nothing, and why."""
    found = []
    for name, idle in _OF.items():
        value = getattr(args, name)
        if value not in (None, False):
            said = args.variables.get(name) or f"--{idle.name}" + f" {value}" * (not idle.switch)
            found.append(f"{said} does nothing: {idle.why}")
    for name in ("redirects", "tee"):
        if ":" in (value := getattr(args, name) or ""):
            said = args.variables.get(name, f"--{name} {value}")
            found.append(f"{said} does nothing: it is for all workers alike; see --local-ranks-filter")
    return found


def origin(variables: Mapping[str, str]) -> str:
    """What a message ends with, if what it is about may have come from the environment."""
    return f" (the environment says {' '.join(variables.values())})" if variables else ""


def variables(
    group: argparse._ArgumentGroup, given: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Flags of the group, out of the environment; and by their names, the variables that they come from.
    `given`: the command line. A variable that is empty is as good as none. Raises ConfigError."""
    words: dict[str, str] = {}
    said: dict[str, str] = {}
    for action in group._group_actions:
        name = f"PET_{action.dest.upper()}"
        text = environ.get(name, "")
        flag = next(flag for flag in action.option_strings if flag.startswith("--"))
        if action.nargs == 0 and name in environ:
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r}: give 0 or 1")
            text = "1" * bool(int(text))
        if text:
            words[action.dest] = flag if action.nargs == 0 else f"{flag}={text}"
            said[action.dest] = f"{name}={text}"
    left_out = _PLACE if given.standalone or "standalone" in words else set()
    if given.join or given.controller or given.ft_leadership or given.master_addr or given.master_port:
        left_out = left_out | {"rdzv_endpoint"}  # where the controller is was said in another way
    on_the_line = {a.dest for a in group._group_actions if getattr(given, a.dest) != a.default}
    kept = words.keys() - left_out - on_the_line
    return [words[name] for name in sorted(kept)], {name: said[name] for name in kept}


def node_rank(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """This node's number, as a launcher that knows nothing of torchrun says it; and its variable. Raises
    ConfigError."""
    for name in _RANK:
        if text := environ.get(name):
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r} is no node's number: give --node-rank")
            return int(text), f"{name}={text}"
    return None


def signals(text: str) -> list[signal.Signals]:
    """Those of `--signals-to-handle` that end no process of ours by themselves. Raises ConfigError."""
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(signal.Signals[name])
        except KeyError:
            raise ConfigError(f"--signals-to-handle {text}: there is no signal {name}") from None
    usual = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [number for number in found if number not in usual]

"""`ftrun`: starts a fault-tolerant job. Takes torchrun's flags, and a few more.

ftrun --standalone --nnodes 3 --nproc-per-node 2 --spares 1 train.py --args   one machine, as if it were four
ftrun --nnodes 4 --nproc-per-node 8 --node-rank 0 --rdzv-endpoint HOST:PORT train.py   on each node
ftrun --join HOST:PORT --job-dir DIR                                          another node, any time
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_core import plugins
from ft_core.cli import torchrun
from ft_core.cli.parser import Parser
from ft_core.control import hooks
from ft_core.elastic.rules import INTERVENTIONS
from ft_core.errors import ConfigError
from ft_core.leadership import is_elected
from ft_core.net import interfaces
from ft_core.node.notices import which
from ft_core.process import inject
from ft_core.process.lines import FORMATS
from ft_core.protocol.sockets import split_address
from ft_core.settings import (
    AUTO,
    POLICIES,
    PREFLIGHT_JOINING,
    PREFLIGHTS,
    SNAPSHOTS,
    STRAGGLERS,
    Command,
    Settings,
)

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 29400
_TORCHRUN = "as torchrun's"
BOTH = 3
"""Streams of a worker, by torchrun's numbers: its output and its errors."""
_SETTINGS = "ft_core.settings"
"""Entry points: given a script's arguments, they return the settings of the configuration found there."""


def parser() -> Parser:
    """The command line of `ftrun`."""
    p = Parser(
        prog="ftrun",
        usage="%(prog)s [flags] script [arguments of the script]; all flags: %(prog)s --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_version()
    about = "Each may come as a variable instead, such as PET_NNODES, as torchrun reads them."
    t = p.add_argument_group(_TORCHRUN, about)
    t.add_argument(
        "--standalone", action="store_true", help="all nodes on this machine, one process tree each"
    )
    t.add_argument(
        "--nnodes",
        default="1",
        metavar="N|MIN:MAX",
        help="nodes that train (spares come on top); with --ft-policy shrink those that the job starts with, "
        "and those that it grows to as nodes join",
    )
    t.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        default="1",
        metavar="N|gpu|xpu|cpu|auto",
        help="workers per node: so many, or one for each GPU, XPU or processor; auto: for each of whatever "
        "there is, the fastest kind",
    )
    t.add_argument(
        "--node-rank",
        "--node_rank",
        type=int,
        default=None,
        help="this node's number, also from SLURM_NODEID or GROUP_RANK; spares: >= nnodes; default: the node "
        "that has the address of --rdzv-endpoint is the first, and the others take places as they come",
    )
    t.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", default="", help="HOST:PORT of the controller (on node rank 0)"
    )
    t.add_argument(
        "--master-addr",
        "--master_addr",
        default=None,
        help=f"the controller's host, another way (default {_DEFAULT_HOST})",
    )
    t.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        default=None,
        help=f"and its port there (default {_DEFAULT_PORT})",
    )
    t.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default="",
        metavar="ID",
        help="the job's id, of which there are never two at the same address: whoever is of another is not "
        "let in. Give that of a job whose controller's machine is lost to a controller that takes its place "
        "(default: one that is drawn; file `id` in the job directory). Workers find it in "
        "TORCHELASTIC_RUN_ID",
    )
    t.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=Settings.max_restarts,
        metavar="N",
        help="where going on in place does not help, start all scripts again, from the newest checkpoint: so "
        f"often in a row without a new step before the job ends; 0: never (default {Settings.max_restarts})",
    )
    t.add_argument(
        "--shutdown-timeout",
        "--shutdown_timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="for workers that handle SIGTERM, to end after it (default: until its sender's patience ends); "
        "and for the newest version's way to storage where the job ends otherwise than by its script's end "
        f"(default {Settings.shutdown_timeout:g})",
    )
    t.add_argument(
        "--signals-to-handle",
        "--signals_to_handle",
        default="",
        metavar="SIGNAL,...",
        help="signals that are taken for SIGTERM, such as SIGUSR1",
    )
    t.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    t.add_argument(
        "--no-python", "--no_python", action="store_true", help="the script is a program; run it unprotected"
    )
    t.add_argument("--role", default="", help="what workers find in ROLE_NAME; nothing else")
    t.add_argument(
        "--log-dir",
        "--log_dir",
        type=Path,
        default=None,
        help="where a job directory is made for each run, as torchrun makes one; --job-dir names it itself",
    )
    t.add_argument(
        "-r",
        "--redirects",
        default=None,
        help="streams that go to log files only: 0 none, 1 out, 2 err, 3 both; default: log files and the "
        "console have both",
    )
    t.add_argument(
        "-t", "--tee", default=None, help="streams that go to log files and the console, by the same numbers"
    )
    t.add_argument(
        "--local-ranks-filter",
        "--local_ranks_filter",
        default="",
        metavar="N,...",
        help="local ranks whose output the console shows (default: all)",
    )
    torchrun.add_idle_flags(t)
    p.abbreviated = t._group_actions
    f = p.add_argument_group("fault tolerance")
    f.add_argument(
        "--job-dir", type=Path, default=None, help="address, secret, events and logs of the job; default: new"
    )
    f.add_argument(
        "--spares",
        "--ft-spares",
        type=int,
        default=None,
        help="nodes that stand by (with --standalone; default 0)",
    )
    f.add_argument(
        "--respawn", action="store_true", help="with --standalone: start a new node for each that dies"
    )
    f.add_argument(
        "--join",
        metavar="HOST:PORT",
        default="",
        help="join the job whose controller is there, as a spare; or give WHERE, as of --ft-leadership",
    )
    f.add_argument(
        "--ft-leadership",
        metavar="WHERE",
        default="",
        help="any node may run the controller, by a lease kept in etcd://HOST:PORT,HOST:PORT,.../NAME "
        "(etcds:// for TLS) or in the Lease kubernetes://NAMESPACE/NAME; default: node rank 0 runs it",
    )
    f.add_argument("--controller", metavar="HOST:PORT", default="", help="another name for --rdzv-endpoint")
    f.add_argument(
        "--ft-replicas",
        type=int,
        default=None,
        help="k: failure domains that may be lost at once (default 1)",
    )
    f.add_argument(
        "--ft-ready-standbys",
        type=_ready,
        default=None,
        metavar="N|auto",
        help="roles of each node that a standby has started ahead of need, so that it has only to load when "
        "the worker dies, and of each of the two nodes that a spare guards: each takes as much memory as a "
        "worker. auto: one for each role for which there is "
        "plenty of memory; with GPUs none beside training, and on a spare one for each GPU and more where "
        "they fit (0, the default: none)",
    )
    f.add_argument(
        "--ft-policy",
        choices=POLICIES,
        default=None,
        help="with no spare left: hold (the default), go on without the replica group, or end the job",
    )
    f.add_argument(
        "--ft-lr-intervention",
        choices=INTERVENTIONS,
        default=None,
        help="learning rate while replica groups are away: by the square root of their share (the default), "
        "by their share, or unchanged",
    )
    f.add_argument(
        "--ft-snapshot",
        choices=SNAPSHOTS,
        default=None,
        help="what copies of the state consist of: lean (the default) leaves out weights that follow from "
        "shards of the optimizer, where they are known to",
    )
    f.add_argument(
        "--ft-every",
        type=_ready,
        metavar="auto|N",
        default=None,
        help="a version is protected every N steps, and at most 2N - 1 finished ones are done again. auto "
        "(the default): 1 as long as copies keep up, else as few as let no step wait for them",
    )
    f.add_argument(
        "--ft-verify",
        action="store_true",
        help="compare the checksums of what several roles hold alike, for each version before the one before "
        "it is given up: where they differ, all do that step again, from where they were alike",
    )
    f.add_argument(
        "--ft-straggler",
        choices=STRAGGLERS,
        default=Settings.straggler,
        help="a role that computes, or waits for its data, for longer than its like in other replica groups: "
        "report (the default) names it; replace takes its node out as well, between two steps, if there is "
        "room on another one; off does not look",
    )
    f.add_argument(
        "--ft-domain",
        default="",
        help="failure domain of this node, such as rack7; of several levels the widest first, row2/rack7; a "
        "comma list for --standalone. Default: what Slurm's topology, the Kubernetes node's labels and "
        "NVLink's fabric say, and behind that the node itself",
    )
    f.add_argument(
        "--ft-domain-from",
        metavar="FILE|COMMAND",
        default="",
        help="who says the failure domain of this node, where the cluster does not: a file with a line `NODE "
        "DOMAIN` for each, or a command that prints it",
    )
    f.add_argument(
        "--ft-interface",
        metavar="WHICH,...",
        default="",
        help="where nodes serve copies of the state: names (ib0), patterns (ib*) or subnets (10.1.0.0/16) of "
        "interfaces, of which each node takes all that it has. Default: those that can do RDMA "
        "(InfiniBand, RoCE), else the one that leads to the controller",
    )
    f.add_argument(
        "--ft-durable-dir", default=None, help="directory of the durable checkpoints (shared by all nodes)"
    )
    f.add_argument(
        "--ft-durable-interval",
        type=int,
        default=None,
        help="steps between durable checkpoints (0, the default: none)",
    )
    f.add_argument(
        "--ft-return-limit",
        type=float,
        default=10.0,
        help="with policy shrink: seconds to wait for the state of a replica group that comes back; it tries "
        "again later",
    )
    f.add_argument(
        "--ft-heartbeat",
        type=float,
        default=0.5,
        help="seconds between an agent's heartbeats (default 0.5); a node is lost after 20 in silence, or "
        "after 10 if it was regular and no other node reaches it",
    )
    f.add_argument(
        "--ft-hang-after",
        type=float,
        default=0.0,
        help="seconds for which roles may wait for another before its worker is taken for hung and replaced "
        "(0, the default: 5 s, and three times what is usual; more for data, storage or a compiler)",
    )
    f.add_argument(
        "--ft-hang-limit",
        type=float,
        default=600.0,
        help="the same where nothing is known yet of what they wait in; and the seconds after which a hang "
        "that cannot be explained costs a restart (default 600)",
    )
    f.add_argument(
        "--ft-quiesce-timeout", type=float, default=60.0, help="seconds a worker may take to leave its step"
    )
    f.add_argument(
        "--ft-pipeline-stages",
        type=int,
        default=None,
        help="with --nnodes MIN:MAX, pipeline stages of the model, if the script's arguments do not say",
    )
    f.add_argument(
        "--ft-strikes",
        default="3/60",
        metavar="N/MINUTES",
        help="a node that has failed N times in so many minutes is not used while there is another (default "
        "3/60; 0: all are used)",
    )
    f.add_argument(
        "--ft-notices",
        action="append",
        default=None,
        metavar="WHO",
        help="who announces that a node's machine is about to go, which drains it: aws, gcp, azure, slurm, "
        "kubernetes, file:PATH, command:WORDS (may be given several times); none; or auto, the default: the "
        "cloud that has made the machine, and Slurm. With --standalone the default is none",
    )
    f.add_argument(
        "--ft-preflight",
        choices=PREFLIGHTS,
        default=PREFLIGHT_JOINING,
        help="which nodes are checked before they are given roles (limits, devices, a computation with a "
        "known answer): those that join, and spares (joining, the default); all, before the first step; or "
        "none (off)",
    )
    f.add_argument(
        "--ft-on",
        action="append",
        default=[],
        metavar="EVENT=COMMAND",
        help="run COMMAND (without a shell) on the machine of the controller, with the event's line of "
        "events.jsonl on its standard input, for each EVENT, such as avoided, drained, waiting, left or "
        "saved; may be given several times",
    )
    f.add_argument(
        "--ft-direct-nodes",
        type=int,
        default=Settings.direct,
        metavar="N",
        help="nodes of a larger job that have a connection with the controller, or the square root of their "
        "number if that is more; the others have one with one of these (default 128; 0: all have one)",
    )
    f.add_argument(
        "--ft-http",
        default=Settings.http,
        metavar="HOST:PORT",
        help="where the controller serves the job's page, /metrics, /healthz and /readyz, to whoever can "
        "reach it there; default: on loopback, at a free port, which the job directory's file http names",
    )
    f.add_argument(
        "--ft-metrics-port",
        default="",
        metavar="[HOST:]PORT",
        help="where each agent serves /metrics of its node, /healthz and /readyz: at this port or, of "
        "several agents on a machine, the first free one from that on; on loopback if no host is given "
        "(default: nowhere)",
    )
    f.add_argument(
        "--ft-log-format",
        choices=FORMATS,
        default="text",
        help="what ftrun and its processes say, on the console and in log files: lines for people, or an "
        "object each (time, level, component, message; node, role, epoch, step where known). The script's "
        "output stays as it is in the files; on the console each line of it is in such an object then, of "
        "component script",
    )
    f.add_argument(
        "--ft-inject", default="", help="failures on purpose: ROLE@POINT:STEP[:HOW],... (for drills)"
    )
    p.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script ...",
        help="the training script and its arguments",
    )
    return p


def parse(words: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """The command line, and what it leaves open as the variables of launchers say it. `variables` of the
    answer: by the names of flags, the variables in which they were found. Raises ConfigError for those; ends
    the process for flags that are none."""
    p = parser()
    words = sys.argv[1:] if words is None else list(words)
    given = p.parse_args(words)
    group = next(group for group in p._action_groups if group.title == _TORCHRUN)
    more, found = torchrun.variables(group, given, environ)
    p.note = torchrun.origin(found)
    args = p.parse_args([*more, *words])
    args.variables = found
    if "--" in args.command[:2]:  # before the script or, as torchrun has it too, right behind it
        args.command.remove("--")
    try:
        one = args.standalone or args.join or _nodes(args)[1] == 1
    except ConfigError as error:
        raise ConfigError(f"{error}{p.note}") from None
    if one and "node_rank" in found:  # of a job of several, of which this one is none
        args.node_rank = None
        del found["node_rank"]
    elif args.node_rank is None and not one and (said := torchrun.node_rank(environ)) is not None:
        args.node_rank, found["node_rank"] = said
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """Check the flags against each other. Raises ConfigError before anything is started."""
    min_nodes, nnodes = _nodes(args)
    nproc = _workers(args.nproc_per_node)
    if not args.command:
        raise ConfigError("no script given")
    script, *arguments = args.command
    if args.no_python and args.module:
        raise ConfigError("--no-python and --module exclude each other")
    if not args.no_python and not args.module:
        _check_script(script)
    if args.spares and not args.standalone:
        raise ConfigError(
            "--spares goes with --standalone; elsewhere start spare nodes with --node-rank >= nnodes"
        )
    if min(args.ft_heartbeat, args.ft_quiesce_timeout, args.ft_return_limit) <= 0:
        raise ConfigError("--ft-heartbeat, --ft-quiesce-timeout and --ft-return-limit must be positive")
    if args.ft_hang_after < 0 or args.ft_hang_limit <= 0:
        raise ConfigError("--ft-hang-after must not be negative, and --ft-hang-limit must be positive")
    if args.ft_hang_after > args.ft_hang_limit:
        raise ConfigError(
            f"--ft-hang-after {args.ft_hang_after:g} is longer than --ft-hang-limit {args.ft_hang_limit:g}: "
            "the job would end before anybody is taken for hung"
        )
    if args.ft_domain_from and args.standalone:
        raise ConfigError(
            "--ft-domain-from is for nodes on machines of their own; --standalone has --ft-domain"
        )
    if args.respawn and not args.standalone:
        raise ConfigError("--respawn goes with --standalone; elsewhere the scheduler starts nodes")
    if args.standalone and args.node_rank not in (None, 0):
        raise ConfigError("--standalone starts all nodes itself: leave --node-rank out")
    where = args.join if is_elected(args.join) else args.ft_leadership
    named = not where and (args.controller or args.rdzv_endpoint or args.master_addr)
    if nnodes > 1 and args.node_rank is None and not (args.standalone or args.join or named):
        raise ConfigError(
            "--nnodes above 1 needs --node-rank, the number of each node (or PET_NODE_RANK, SLURM_NODEID or "
            "GROUP_RANK in its environment); or --standalone, for all of them on this machine"
        )
    if where and args.standalone:
        raise ConfigError("--ft-leadership is for a job on several machines; --standalone has one")
    if where and (args.controller or args.rdzv_endpoint):
        raise ConfigError("--ft-leadership finds the controller: leave --rdzv-endpoint and --controller out")
    controller = "" if where else _controller_address(args, nnodes)
    others = args.join or (not args.standalone and (nnodes > 1 or args.node_rank))
    if controller.endswith(":0") and others:
        raise ConfigError(f"{controller}: the nodes of a job must know the controller's port; give one")
    inject.parse(args.ft_inject)
    files, console = _streams("--redirects", args.redirects), _streams("--tee", args.tee)
    if console is None:
        console = BOTH & ~(files or 0)
    run_id, role = args.rdzv_id, args.role
    given = _given(args)
    strikes, minutes = _strikes(args.ft_strikes)
    settings = Settings(
        nnodes=nnodes,
        min_nodes=min_nodes if min_nodes < nnodes else 0,
        nproc_per_node=nproc,
        command=Command(script, arguments, args.module, args.no_python),
        controller=controller,
        leadership=where,
        run_id=_run_id(args.rdzv_id),
        heartbeat=args.ft_heartbeat,
        quiesce_timeout=args.ft_quiesce_timeout,
        hang_after=args.ft_hang_after,
        hang_limit=args.ft_hang_limit,
        return_limit=args.ft_return_limit,
        strikes=strikes,
        strike_minutes=minutes,
        redirects=BOTH if files is None else files,
        tee=console,
        log_prefix=args.tee is not None,
        local_ranks=_local_ranks(args.local_ranks_filter),
        environment={
            **({"TORCHELASTIC_RUN_ID": run_id} if run_id else {}),
            **({"ROLE_NAME": role} if role else {}),
        },
        log_format=args.ft_log_format,
        inject=args.ft_inject,
        verify=args.ft_verify,
        straggler=args.ft_straggler,
        max_restarts=args.max_restarts,
        direct=args.ft_direct_nodes,
        interfaces=interfaces.parse(args.ft_interface),
        http=_address("--ft-http", args.ft_http),
        metrics=_metrics(args.ft_metrics_port),
        notices=which.parse(args.ft_notices or [which.NONE if args.standalone else which.AUTO]),
        preflight=args.ft_preflight,
        hooks=hooks.parse(args.ft_on),
        **given,
        given=sorted(given),
    )
    for read in plugins.load(_SETTINGS) if not args.no_python else ():
        settings = settings.configured(read(arguments), "the configuration in the script's arguments")
    settings.check()
    # Elsewhere each spare is started by itself: the script's wish for some starts none.
    return settings if args.standalone else dataclasses.replace(settings, spares=0)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Flags that were given, of those for which it matters: the script's own configuration may have other
    values, or it means more that they were."""
    durable = args.ft_durable_dir
    found = {
        "spares": args.spares,
        "replicas": args.ft_replicas,
        "ready_standbys": args.ft_ready_standbys,
        "policy": args.ft_policy,
        "lr_intervention": args.ft_lr_intervention,
        "snapshot": args.ft_snapshot,
        "durable_dir": str(Path(durable).resolve()) if durable else durable,
        "durable_interval": args.ft_durable_interval,
        "stages": args.ft_pipeline_stages,
        "every": args.ft_every,
        "shutdown_timeout": args.shutdown_timeout,
    }
    return {name: value for name, value in found.items() if value is not None}


def _controller_address(args: argparse.Namespace, nnodes: int) -> str:
    given = args.join or args.controller or args.rdzv_endpoint
    if given:
        host, _, port = given.rpartition(":")
        if not host:
            return f"{given}:{_DEFAULT_PORT}"
        if not port.isdigit() or int(port) >= 1 << 16:
            raise ConfigError(f"{given!r} is no HOST:PORT")
        return str(given)
    if args.standalone or nnodes == 1:
        return f"{_DEFAULT_HOST}:0"
    return f"{args.master_addr or _DEFAULT_HOST}:{args.master_port or _DEFAULT_PORT}"


def _nodes(args: argparse.Namespace) -> tuple[int, int]:
    """(MIN, MAX); (0, N) where there is no range."""
    first, _, most = args.nnodes.rpartition(":")
    least, nnodes = _count("--nnodes", first) if first else 0, _count("--nnodes", most)
    if least > nnodes:
        raise ConfigError(f"--nnodes {args.nnodes}: give MIN:MAX")
    return least, nnodes


def _workers(text: str) -> int:
    """How many workers a node has, as torchrun counts them."""
    if text in ("gpu", "xpu", "auto"):
        import torch  # slow, and needed for this question only

        if text == "auto":
            if torch.accelerator.is_available():
                return torch.accelerator.device_count()
            text = "cpu"
        else:
            devices: Any = torch.cuda if text == "gpu" else torch.xpu
            if not devices.is_available():
                raise ConfigError(f"--nproc-per-node {text}: torch sees no {text.upper()} here")
            return int(devices.device_count())
    return len(os.sched_getaffinity(0)) if text == "cpu" else _count("--nproc-per-node", text)


def _check_script(script: str) -> None:
    """What Python would refuse, on all machines, is refused before they are there."""
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r} (give -m for a module)")
    try:
        source = Path(script).read_bytes()
        if b"\0" in source:  # an archive, or compiled
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers say it
            compile(source, script, "exec", dont_inherit=True)
    except OSError as error:
        raise ConfigError(f"{script} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        text = (isinstance(error, SyntaxError) and error.text) or ""
        raise ConfigError(
            f"{script}{line}: {getattr(error, 'msg', error)}{': ' * bool(text)}{text.strip()} (for a program "
            "that is no Python script give --no-python)"
        ) from None


def _streams(flag: str, text: str | None) -> int | None:
    """By torchrun's numbers; None where nothing is said of all workers alike."""
    if text is None or re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        return None
    if text not in ("0", "1", "2", "3"):
        raise ConfigError(f"{flag} {text!r}: give 0, 1, 2 or 3")
    return int(text)


def _local_ranks(text: str) -> list[int]:
    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise ConfigError(f"--local-ranks-filter {text!r}: give local ranks, such as 0,1")
    return sorted({int(rank) for rank in text.split(",") if rank})


def _run_id(text: str) -> str:
    if not text or re.fullmatch(r"[0-9A-Za-z._-]{1,64}", text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _count(flag: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{flag} {text!r}: give a number of 1 or more")
    return int(text)


def _ready(text: str) -> int:
    return AUTO if text == "auto" else int(text)


def _strikes(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d+)(?:/(\d+(?:\.\d+)?))?", text)
    if found is None or (found[2] is None and int(found[1])) or (found[2] and not float(found[2])):
        raise ConfigError(f"--ft-strikes {text!r}: give N/MINUTES, or 0")
    return int(found[1]), float(found[2] or 60)


def _address(flag: str, text: str) -> str:
    try:
        split_address(text)
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give HOST:PORT") from None
    return text


def _metrics(text: str) -> str:
    return text and _address("--ft-metrics-port", text if ":" in text else f"127.0.0.1:{text}")

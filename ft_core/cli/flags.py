"""`ftrun`: starts a fault-tolerant job. Takes torchrun's flags, and a few more.

ftrun --standalone --nnodes 3 --nproc-per-node 2 --spares 1 train.py --args   one machine, as if it were four
ftrun --nnodes 4 --nproc-per-node 8 --node-rank 0 --rdzv-endpoint HOST:PORT train.py   on each node
ftrun --join HOST:PORT --job-dir DIR                                          another node, any time
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

from ft_core import plugins
from ft_core.elastic.rules import INTERVENTIONS
from ft_core.errors import ConfigError
from ft_core.leadership import is_elected
from ft_core.process import inject
from ft_core.process.lines import FORMATS
from ft_core.protocol.sockets import split_address
from ft_core.settings import AUTO, POLICIES, SNAPSHOTS, Command, Settings

_DEFAULT_PORT = 29400
_SETTINGS = "ft_core.settings"
"""Entry points: given a script's arguments, they return the settings of the configuration found there."""


def parser() -> argparse.ArgumentParser:
    """The command line of `ftrun`."""
    p = argparse.ArgumentParser(
        prog="ftrun",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    t = p.add_argument_group("as torchrun's")
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
    t.add_argument("--nproc-per-node", "--nproc_per_node", default="1", help="workers per node, or `gpu`")
    t.add_argument(
        "--node-rank", "--node_rank", type=int, default=None, help="this node's number; spares: >= nnodes"
    )
    t.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", default="", help="HOST:PORT of the controller (on node rank 0)"
    )
    t.add_argument(
        "--master-addr", "--master_addr", default="127.0.0.1", help="the controller's host, another way"
    )
    t.add_argument(
        "--master-port", "--master_port", type=int, default=_DEFAULT_PORT, help="and its port there"
    )
    t.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default="",
        metavar="ID",
        help="the job's id, of which there are never two at the same address: whoever is of another is not "
        "let in. Give that of a job whose controller's machine is lost to a controller that takes its place "
        "(default: one that is drawn; file `id` in the job directory)",
    )
    t.add_argument("--rdzv-backend", "--rdzv_backend", default="", help="accepted and ignored")
    t.add_argument(
        "--max-restarts", "--max_restarts", default="", help="accepted and ignored: nothing is restarted"
    )
    t.add_argument(
        "--shutdown-timeout",
        "--shutdown_timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="for workers that handle SIGTERM, to end after it; default: until its sender's patience ends",
    )
    t.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    t.add_argument(
        "--no-python", "--no_python", action="store_true", help="the script is a program; run it unprotected"
    )
    t.add_argument("--log-dir", "--log_dir", type=Path, default=None, help="another name for --job-dir")
    t.add_argument(
        "-r", "--redirects", default="3", help="streams that go to log files: 0 none, 1 out, 2 err, 3 both"
    )
    t.add_argument(
        "-t", "--tee", default=None, help="streams that go to log files and the console (default 3)"
    )
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
        "plenty of memory, none where there are GPUs (0, the default: none)",
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
        "--ft-domain",
        default="",
        help="failure domain of this node (rack, switch); a comma list for --standalone",
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
        "(0, the default: 5 s, and three times what is usual)",
    )
    f.add_argument(
        "--ft-hang-limit",
        type=float,
        default=600.0,
        help="the same where nothing is known yet of what they wait in; and the seconds after which a hang "
        "that cannot be explained ends the job (default 600)",
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


def settings_of(args: argparse.Namespace) -> Settings:
    """Check the flags against each other. Raises ConfigError before anything is started."""
    first, _, most = str(args.nnodes).rpartition(":")
    nnodes, min_nodes = _count("--nnodes", most), _count("--nnodes", first) if first else 0
    if min_nodes > nnodes:
        raise ConfigError(f"--nnodes {args.nnodes}: give MIN:MAX")
    nproc = (
        _gpus() if args.nproc_per_node in ("gpu", "auto") else _count("--nproc-per-node", args.nproc_per_node)
    )
    if not args.command:
        raise ConfigError("no script given")
    script, *arguments = args.command
    if not args.no_python and not args.module and not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r} (give -m for a module)")
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
    if args.respawn and not args.standalone:
        raise ConfigError("--respawn goes with --standalone; elsewhere the scheduler starts nodes")
    if args.standalone and args.node_rank not in (None, 0):
        raise ConfigError("--standalone starts all nodes itself: leave --node-rank out")
    if nnodes > 1 and args.node_rank is None and not args.standalone and not args.join:
        raise ConfigError("--nnodes above 1 needs --node-rank (or --standalone)")
    where = args.join if is_elected(args.join) else args.ft_leadership
    if where and args.standalone:
        raise ConfigError("--ft-leadership is for a job on several machines; --standalone has one")
    if where and (args.controller or args.rdzv_endpoint):
        raise ConfigError("--ft-leadership finds the controller: leave --rdzv-endpoint and --controller out")
    controller = "" if where else _controller_address(args)
    if controller.endswith(":0") and (args.join or (nnodes > 1 and not args.standalone)):
        raise ConfigError(f"{controller}: the nodes of a job must know the controller's port; give one")
    inject.parse(args.ft_inject)
    streams = "3" if args.tee is None else args.tee
    for flag, value in (("--redirects", args.redirects), ("--tee", streams)):
        if value not in ("0", "1", "2", "3"):
            raise ConfigError(f"{flag} {value!r}: give 0, 1, 2 or 3, the same for all workers")
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
        redirects=int(args.redirects),
        tee=int(streams),
        log_prefix=args.tee is not None,
        log_format=args.ft_log_format,
        inject=args.ft_inject,
        direct=args.ft_direct_nodes,
        http=_address("--ft-http", args.ft_http),
        metrics=_metrics(args.ft_metrics_port),
        **given,
        given=sorted(given),
    )
    for read in plugins.load(_SETTINGS) if not args.no_python else ():
        settings = settings.configured(read(arguments), "the configuration in the script's arguments")
    settings.check()
    # Elsewhere each spare is started by itself: the script's wish for some starts none.
    return settings if args.standalone else dataclasses.replace(settings, spares=0)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Flags for which the script's own configuration may have other values: those that were given."""
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
    }
    return {name: value for name, value in found.items() if value is not None}


def _controller_address(args: argparse.Namespace) -> str:
    given = args.join or args.controller or args.rdzv_endpoint
    if given:
        host, _, port = given.rpartition(":")
        if not host:
            return f"{given}:{_DEFAULT_PORT}"
        if not port.isdigit() or int(port) >= 1 << 16:
            raise ConfigError(f"{given!r} is no HOST:PORT")
        return str(given)
    if args.standalone or args.nnodes == "1":
        return "127.0.0.1:0"
    return f"{args.master_addr}:{args.master_port}"


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


def _gpus() -> int:
    import torch  # slow, and needed for this question only

    return torch.cuda.device_count() or 1

"""The agent: one process per node. Starts workers, owns the snapshot memory, moves replicas, reports.

Started by `ftrun`, or by a recipe on each node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path

from ft_core.errors import FAILED_NOTE, FtError
from ft_core.node.link import pulse
from ft_core.node.shell import LAST_WORD, NodeShell, kill_node
from ft_core.node.workers import orphans
from ft_core.process import collector, handed, last_line, parent
from ft_core.process.async_writer import console, log_to_console
from ft_core.process.descriptors import check_limit
from ft_core.process.lines import LOG_CONTEXT
from ft_core.settings import known

log = logging.getLogger("ft_core.node")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ft_core.node", description=__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--node", required=True, help="this node's name, unique in the job")
    parser.add_argument("--domain", default="", help="failure domain label (rack, switch); default: the node")
    parser.add_argument("--node-rank", type=int, default=-1, help="place at the start; -1: a spare; -2: any")
    parser.add_argument("--temporary", help="directory for sockets, which whoever gives it reads and removes")
    parser.add_argument("--beside-controller", action="store_true", help="it has the same console")
    parent.add_argument(parser)
    last_line.add_argument(parser)
    handed.add_argument(parser)
    args = parser.parse_args()
    parent.expect(args.parent)
    last_line.share(args.last_line)
    if args.temporary:  # multiprocessing would make one, and leave it behind when this process is killed
        multiprocessing.current_process()._config["tempdir"] = args.temporary  # type: ignore[attr-defined]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # a node's processes are one group: killed together, as a node would be
    orphans.adopt()
    # For the fork server, and for workers until they have a role: Slurm sends it to every process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    collector.exempt()
    settings, secret = known(args.job_dir, handed.take(args.handed))
    loop, about = pulse.Loop(), (secret, args.node, settings.pulse)
    orphans.own(pulse.start(loop, *about))  # before there is any thread
    LOG_CONTEXT.json, LOG_CONTEXT.component = settings.log_format == "json", "agent"
    LOG_CONTEXT.about = lambda: {"node": args.node}
    log_to_console()
    console().keep(args.job_dir / "logs" / f"{args.node}-{os.getpid()}" / "agent.log")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Or asking whether there is a GPU, as DeepSpeed's import does, leaves the fork server's children none.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Connections break at every failure; c10d would write a C++ stack trace for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if parent.gone():
        kill_node()
    check_limit(f"node {args.node}", *settings.size)
    shell = NodeShell(settings, secret, args.job_dir, args.node, args.domain, args.node_rank, loop)
    shell.speaks = not args.beside_controller
    return asyncio.run(_serve(shell, args.temporary))


async def _serve(shell: NodeShell, temporary: str | None) -> int:
    if temporary:
        (Path(temporary) / FAILED_NOTE).unlink(missing_ok=True)
    try:
        return await shell.run()
    except Exception as error:
        said = f" {error}" if isinstance(error, FtError) else f"\n{traceback.format_exc()}"
        log.critical("node %s fails, and is lost to the job:%s", shell.node, said)
        console().flush(LAST_WORD)
        if temporary:
            with contextlib.suppress(OSError):
                (Path(temporary) / FAILED_NOTE).touch()
        os.killpg(os.getpgrp(), signal.SIGKILL)  # at once: the workers are of no use without their agent
        raise


if __name__ == "__main__":
    sys.exit(main())

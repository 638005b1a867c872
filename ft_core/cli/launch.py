"""`ftrun`: starts what a machine has of a job, as the command line says, and waits for the end."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from ft_core.cli.flags import parser, settings_of
from ft_core.cli.job_dir import check, prepared
from ft_core.cli.launcher import Launcher, tell
from ft_core.errors import ConfigError
from ft_core.process.lines import VOICE
from ft_core.settings import SHORTEST, Settings, read_secret, unique, write_secret

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the job, and at last are ignored."""


def main(argv: list[str] | None = None) -> int:
    """Entry of `ftrun`. Returns the job's exit code."""
    _open_standard_streams()
    args = parser().parse_args(argv)
    VOICE.json = args.ft_log_format == "json"
    try:
        launcher = _join(args) if args.join else _launch(args)
    except ConfigError as error:
        tell(f"ftrun: {error}", "ERROR")
        return 2
    launcher.patience = math.inf if args.shutdown_timeout is None else args.shutdown_timeout
    signal.signal(signal.SIGTERM, lambda *_: launcher.terminate())
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:  # else nohup has said that it is to be ignored
            signal.signal(number, _end)
    try:
        return launcher.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        for number in ENDS:  # somebody may be impatient in the moment that this takes
            signal.signal(number, signal.SIG_IGN)
        launcher.stop()


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _launch(args: argparse.Namespace) -> Launcher:
    settings = settings_of(args)
    job_dir = _job_dir(args)
    launcher = Launcher(job_dir)
    if settings.controller.endswith(":0"):
        settings = dataclasses.replace(settings, controller=launcher.reserve(settings.controller))
    try:
        if not settings.leadership and (args.standalone or args.node_rank in (None, 0)):
            launcher.claim()
        _take_secret(job_dir)
        settings.write(job_dir)
        (job_dir / "controller").write_text(settings.meeting + "\n")
    except OSError as error:
        raise ConfigError(
            f"nothing can be written into the job directory {job_dir}: {error.strerror}"
        ) from error
    if args.standalone:
        domains = [d.strip() for d in args.ft_domain.split(",")] if args.ft_domain else []
        launcher.standalone, launcher.respawn = True, args.respawn
        launcher.needed = settings.nnodes
        launcher.controller()
        for rank in range(settings.first_nodes + settings.spares):
            domain = domains[rank] if rank < len(domains) else ""
            launcher.agent(f"node{next(launcher.numbers)}", rank, domain)
        return launcher
    rank = args.node_rank or 0
    if settings.leadership:
        launcher.candidate(spare=rank >= settings.nnodes)
    elif rank == 0:
        launcher.controller()
    place = f"{socket.gethostname()}-{rank}"
    launcher.agent(unique(place), rank, args.ft_domain or place)
    return launcher


def _join(args: argparse.Namespace) -> Launcher:
    """Join a running job as a spare, with its own command line if its directory is not shared."""
    if args.command:
        settings = settings_of(args)
        job_dir = _job_dir(args)
        _take_secret(job_dir)
        settings.write(job_dir)
    elif args.job_dir is None:
        raise ConfigError("--join needs the job's --job-dir, or the job's own command line")
    else:
        job_dir = args.job_dir.resolve()
        settings = Settings.read(job_dir)
        check(job_dir)
        read_secret(job_dir)
        _take_secret(job_dir)
        VOICE.json = settings.log_format == "json"
    if settings.meeting != args.join:
        raise ConfigError(f"--join {args.join}: the job in {job_dir} is at {settings.meeting}")
    launcher = Launcher(job_dir)
    if settings.leadership:
        launcher.candidate(spare=True)
    launcher.agent(unique(socket.gethostname()), -1, args.ft_domain)
    return launcher


def _take_secret(job_dir: Path) -> None:
    secret = write_secret(job_dir)
    if len(secret) < SHORTEST:
        tell(
            f"ftrun: the job's secret has {len(secret)} bytes only: who hears one of its connections being "
            "made can guess it; `openssl rand -hex 32` makes one",
            "WARNING",
        )


def _open_standard_streams() -> None:
    """Those that were closed, as by `>&-`: the next files that are opened would be taken for them, by all
    processes of the job."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _job_dir(args: argparse.Namespace) -> Path:
    given = args.job_dir or args.log_dir
    if given is None:
        path = Path(tempfile.mkdtemp(prefix="ftjob-"))
        tell(f"ftrun: job directory {path}")
        return path
    return prepared(Path(given))


if __name__ == "__main__":
    sys.exit(main())

"""`ftrun`: starts what a machine has of a job, as the command line says, and waits for the end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from ft_core.cli import failure_domains, torchrun
from ft_core.cli.flags import parse, settings_of
from ft_core.cli.job_dir import check, prepared
from ft_core.cli.launcher import INTERRUPTED, Launcher
from ft_core.control import hooks
from ft_core.errors import ConfigError
from ft_core.net import interfaces
from ft_core.process.async_writer import console, say
from ft_core.process.lines import LOG_CONTEXT
from ft_core.protocol.sockets import listen, only_here, seen_by_others, split_address
from ft_core.settings import (
    ANY_RANK,
    JOB,
    SECRET_ADVICE,
    SECRET_ENV,
    SHORTEST,
    Settings,
    job_id,
    put,
    read_secret,
    unique,
    write_secret,
)

_NAME_KNOWN = 600.0
"""Seconds that a name may take until it is known everywhere."""
_LOOK_UP = 1.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the job, and at last are ignored."""
_LAST_WORD = 2.0
"""Seconds in which what was said last may be read."""


def main(argv: list[str] | None = None) -> int:
    """Entry of `ftrun`. Returns the job's exit code."""
    _open_standard_streams()
    try:
        return _main(argv)
    finally:
        console().flush(_LAST_WORD)


def _main(argv: list[str] | None) -> int:
    variables: dict[str, str] = {}
    try:
        args = parse(argv)
        LOG_CONTEXT.json, variables = args.ft_log_format == "json", args.variables
        like_sigterm = [signal.SIGTERM, *torchrun.signals(args.signals_to_handle)]
        for note in torchrun.notes(args):
            say(f"ftrun: {note}")
        launcher = _join(args) if args.join else _launch(args)
    except ConfigError as error:
        say(f"ftrun: {error}{torchrun.origin(variables)}", "ERROR")
        return 2
    except KeyboardInterrupt:  # while it waits for a name
        return INTERRUPTED
    launcher.patience = math.inf if args.shutdown_timeout is None else args.shutdown_timeout
    for number in like_sigterm:
        signal.signal(number, lambda *_: launcher.terminate())
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell's `&` has it ignored
        signal.signal(signal.SIGINT, lambda *_: launcher.interrupt())
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:  # else nohup has said that it is to be ignored
            signal.signal(number, _end)
    try:
        return launcher.wait()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        for number in ENDS:  # somebody may be impatient in the moment that this takes
            signal.signal(number, signal.SIG_IGN)
        launcher.stop()


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _launch(args: argparse.Namespace) -> Launcher:
    settings = settings_of(args)
    _check_hooks(settings, first=not args.node_rank)
    several = settings.nnodes > 1 and not args.standalone
    where = failure_domains.FailureDomain() if args.standalone else _where(args)
    if several and not os.environ.get(SECRET_ENV) and args.job_dir is None:
        raise ConfigError(f"{SECRET_ENV} is not set: {SECRET_ADVICE}")
    job_dir = _job_dir(args)
    if several:
        _say_where_the_secret_is(job_dir)
        _wait_for_name(settings.controller)
    rank = args.node_rank
    if rank is None:
        rank = 0 if args.standalone or not several or _is_here(settings.controller) else ANY_RANK
    if several and rank == 0 and not settings.leadership:
        _tell_where_others_come(settings.controller)
    _tell_where_state_goes(settings, told=several and rank in (0, ANY_RANK))
    launcher = Launcher(job_dir)
    if settings.controller.endswith(":0"):
        settings = dataclasses.replace(settings, controller=launcher.reserve(settings.controller))
    try:
        leads = not settings.leadership and rank == 0
        if leads:
            launcher.claim()
        secret, own = _take_secret(job_dir), settings
        if leads or _is_first(settings, job_dir):
            settings.write(job_dir)
            put(job_dir / "controller", settings.meeting + "\n")
        if leads:
            own = dataclasses.replace(settings, run_id=job_id(job_dir, settings.run_id))
    except OSError as error:
        raise ConfigError(
            f"nothing can be written into the job directory {job_dir}: {error.strerror}"
        ) from error
    launcher.hand(own, secret)
    if args.standalone:
        domains = [d.strip() for d in args.ft_domain.split(",")] if args.ft_domain else []
        launcher.standalone, launcher.respawn = True, args.respawn
        launcher.needed = settings.nnodes
        launcher.controller()
        for rank in range(settings.first_nodes + settings.spares):
            domain = domains[rank] if rank < len(domains) else ""
            launcher.agent(f"node{next(launcher.numbers)}", rank, domain)
        return launcher
    if settings.leadership:
        launcher.candidate(spare=rank >= settings.nnodes)
    elif rank == 0:
        launcher.controller()
    launcher.sole_node = settings.nnodes == 1 and not settings.leadership
    place = socket.gethostname() + f"-{rank}" * (rank != ANY_RANK)
    if where.source and rank in (0, ANY_RANK):  # what others say is in events.jsonl
        say(f"ftrun: failure domain {where.of(place)}, from {where.source}")
    launcher.agent(unique(place), rank, where.of(place))
    return launcher


def _is_first(settings: Settings, job_dir: Path) -> bool:
    """Whether no job yet in this directory meets where this one does. Raises ConfigError if one does that has
    other flags: whoever joins it by its directory would get what this one is about to write. What becomes of
    who has another script, or other arguments, is for the job's controller to say."""
    if not (job_dir / JOB).exists():
        return True
    try:
        there = Settings.read(job_dir)
    except ConfigError:  # of another version, or torn
        return True
    if there.meeting != settings.meeting:
        return True
    differences = settings.differences(there.alike)
    differences.pop("command", None)
    if differences:
        raise ConfigError(
            f"{job_dir} is the directory of another job: {'; '.join(differences.values())}; give a new one, "
            "or the command line of that job"
        )
    return False


def _check_hooks(settings: Settings, *, first: bool = False) -> None:
    """Raise ConfigError for a command that the controller could not run, if that may be on this machine.
    `first`: it may be the first node."""
    if settings.leadership or first:
        hooks.check(settings.hooks)


def _where(args: argparse.Namespace) -> failure_domains.FailureDomain:
    """The failure domain of this machine. Raises ConfigError."""
    found = failure_domains.find(args.ft_domain, args.ft_domain_from)
    if found.trouble:
        say(f"ftrun: {found.trouble}", "WARNING")
    return found


def _tell_where_state_goes(settings: Settings, told: bool) -> None:
    """The interfaces on which this machine serves state, said if that is to be `told`. Raises ConfigError if
    it has none of those that were asked for."""
    found = interfaces.chosen(settings.interfaces, settings.controller)
    if told and found:
        say(f"ftrun: state is served on {', '.join(map(str, found))}")


def _say_where_the_secret_is(job_dir: Path) -> None:
    """Nodes that do not agree about it would wait for each other."""
    if not os.environ.get(SECRET_ENV) and not (job_dir / "secret").exists():
        say(
            f"ftrun: {SECRET_ENV} is not set: the job's secret is drawn, and put into {job_dir / 'secret'}. "
            "Nodes that do not share this directory are refused without it"
        )


def _wait_for_name(address: str) -> None:
    """Wait until the name of the controller's host is known: where machines are started together, their names
    are known a little later. Raises ConfigError if that takes too long."""
    host, began, told = split_address(address)[0] if address else "", time.monotonic(), False
    while host:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() - began > _NAME_KNOWN:
                raise ConfigError(
                    f"{host}, where the controller is to be, is the name of no machine: {error}"
                ) from None
            if not told:
                say(f"ftrun: {host}, where the controller is to be, has no address yet; trying again")
            told = True
        time.sleep(_LOOK_UP)


def _tell_where_others_come(controller: str) -> None:
    """Where the name of the controller's machine is none that others can use. Raises ConfigError if it has no
    way to others."""
    host, _ = split_address(controller)
    if not (own := only_here(host)):
        return
    problem = f"{host} is {own} on this machine (/etc/hosts), where no other machine reaches it"
    if (there := seen_by_others(controller)) == controller:
        raise ConfigError(f"{problem}, nor is there a route to others: give its address, --rdzv-endpoint")
    say(
        f"ftrun: {problem}: the controller is at {there}, the address by which this machine reaches others. "
        "If that is not where they come, give its address with --rdzv-endpoint, on all nodes"
    )


def _is_here(address: str) -> bool:
    """Whether this machine has the address of the controller, and nobody listens there yet."""
    with contextlib.suppress(OSError), listen(*split_address(address)):
        return True
    return False


def _join(args: argparse.Namespace) -> Launcher:
    """Join a running job as a spare, with its own command line if its directory is not shared."""
    where = _where(args)
    if args.command:
        settings = settings_of(args)
        _check_hooks(settings)
        job_dir = _job_dir(args)
        secret = _take_secret(job_dir)
        if _is_first(settings, job_dir):
            settings.write(job_dir)
    elif args.job_dir is None:
        raise ConfigError("--join needs the job's --job-dir, or the job's own command line")
    else:
        job_dir = args.job_dir.resolve()
        if not job_dir.exists():
            raise ConfigError(
                f"--join: there is no {job_dir} here. Where the job's directory cannot be seen, give this "
                f"machine one of its own and the job's command line, and set {SECRET_ENV}: "
                f"ftrun --nnodes ... --nproc-per-node ... --join {args.join} --job-dir DIR SCRIPT ..."
            )
        settings = Settings.read(job_dir)
        _check_hooks(settings)
        check(job_dir)
        read_secret(job_dir)
        secret = _take_secret(job_dir)
        LOG_CONTEXT.json = settings.log_format == "json"
    if settings.meeting != args.join:
        raise ConfigError(f"--join {args.join}: the job in {job_dir} is at {settings.meeting}")
    _tell_where_state_goes(settings, told=False)
    launcher = Launcher(job_dir)
    launcher.hand(settings, secret)
    if settings.leadership:
        launcher.candidate(spare=True)
    launcher.agent(unique(socket.gethostname()), -1, where.of(socket.gethostname()) if where.source else "")
    return launcher


def _take_secret(job_dir: Path) -> bytes:
    secret = write_secret(job_dir)
    if len(secret) < SHORTEST:
        say(
            f"ftrun: the job's secret has {len(secret)} bytes only: who hears one of its connections being "
            "made can guess it; `openssl rand -hex 32` makes one",
            "WARNING",
        )
    return secret


def _open_standard_streams() -> None:
    """Those that were closed, as by `>&-`: the next files that are opened would be taken for them, by all
    processes of the job."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _job_dir(args: argparse.Namespace) -> Path:
    if args.job_dir is not None:
        return prepared(args.job_dir)
    logs = prepared(args.log_dir) if args.log_dir is not None else None
    try:
        path = Path(tempfile.mkdtemp(prefix="ftjob-", dir=logs))
    except OSError as error:
        raise ConfigError(f"there can be no job directory in {logs}: {error.strerror}") from error
    say(f"ftrun: job directory {path}")
    return path


if __name__ == "__main__":
    sys.exit(main())

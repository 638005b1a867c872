"""`ftctl doctor`: what on this machine, or in this job, would keep a recovery from working.

    ftctl doctor                                      this machine
    ftctl doctor ftrun --nnodes 4 ... train.py --ft   and this command line, before it is run
    ftctl doctor --job-dir DIR                        and a running job: what would the next failure find?
    ftctl doctor --patches                            what of torch and the frameworks is replaced, and why
    ftctl doctor --node                               whether it is sick: what is checked of a node that joins
    ftctl doctor --network HOST HOST ...              on all of them at once: the rate at which state travels

Run it on every node, spares too, in the environment of the job (`srun`, `kubectl exec`): it sees one machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

import msgspec

from ft_core import patching, plugins
from ft_core.cli.doctor import job, machine, network, racks, rate, software
from ft_core.cli.doctor.case import Case, case
from ft_core.errors import FtError
from ft_core.node.admission import examination
from ft_core.node.admission.findings import Finding, Level
from ft_core.protocol.messages import Soundness
from ft_core.settings import read_secret

_SOUND = {Soundness.OK: "ok  ", Soundness.SICK: "SICK", Soundness.UNKNOWN: "?   "}
_SIGNS = {Level.OK: "ok  ", Level.WARN: "warn", Level.FAIL: "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `ftctl doctor`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for flag, options in (("--job-dir", {"type": Path}), ("--controller", {"metavar": "HOST:PORT"})):
        # Also before the word `doctor`, as with ftctl's other commands: what stands there must not be undone.
        parser.add_argument(flag, default=argparse.SUPPRESS, help="a job's, as above", **options)
    parser.add_argument("--json", action="store_true", help="the same, for programs")
    parser.add_argument("--patches", action="store_true", help="list what is replaced in frameworks")
    parser.add_argument(
        "--node",
        action="store_true",
        help="check this machine as a node that joins a job is: limits, devices, a computation with a known "
        "answer, with figures (exit code 1: it is sick)",
    )
    parser.add_argument(
        "--network",
        nargs="+",
        metavar="HOST[:PORT]",
        help="how fast nodes send each other state: give all of them, on all of them. Each sends to the "
        f"next, by the job's transport and secret (default port {rate.PORT})",
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="command ...", help="the job's command line, or its script"
    )


def examine(case: Case) -> list[Finding]:
    """What all checks say, in the order of their reading."""
    parts = (software, machine, network, racks, job)
    return [finding for part in parts for check in part.CHECKS for finding in check(case)]


def _list_patches(as_json: bool) -> int:
    found = patching.declared(plugins.packages())
    if as_json:
        print(json.dumps([{"target": patch.target, "reason": patch.reason} for patch in found], indent=1))
        return 0
    for name, patches in itertools.groupby(found, key=patching.framework):
        print(name)
        for patch in patches:
            print(f"  {patch.target}: {patch.reason}")
    return 0


def _network(args: argparse.Namespace) -> int:
    try:
        found = rate.measure(args.network, read_secret(args.job_dir))
    except (FtError, OSError) as error:
        print(f"ftctl doctor --network: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"network": dataclasses.asdict(found)}) if args.json else found, flush=True)
    return 0


def _node(as_json: bool) -> int:
    import torch

    devices = max(1, torch.cuda.device_count())
    found = examination.Examination()
    subject = examination.Subject("127.0.0.1", devices, devices, dict(os.environ))

    def tell(line: examination.Line) -> None:
        examination.add(found, line)
        if line.check is not None and not as_json:
            check = line.check
            print(f"{_SOUND[check.soundness]}  {check.name}: {check.found}", flush=True)
            if check.why:
                print(f"      {check.why}", flush=True)

    examination.examine(subject, tell)
    sick = sum(check.soundness is Soundness.SICK for check in found.checks)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))
    else:
        print(f"{len(found.checks)} checks, {f'{sick} say that it is sick' if sick else 'it is well'}")
    return int(sick > 0)


def main(args: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if any check failed."""
    if args.patches:
        return _list_patches(args.json)
    if args.node:
        return _node(args.json)
    if args.network:
        return _network(args)
    found = examine(case(args.job_dir, args.controller, args.words))
    failed = any(f.level is Level.FAIL for f in found)
    if args.json:
        print(json.dumps([dataclasses.asdict(f) for f in found], indent=1))
        return int(failed)
    for finding in found:
        print(f"{_SIGNS[finding.level]}  {finding.name}: {finding.found}")
        if finding.level is not Level.OK:
            print(f"      {finding.advice}")
    bad = [f for f in found if f.level is not Level.OK]
    print(
        f"{len(found)} checks, {len(bad)} with something to do" if bad else f"{len(found)} checks, all well"
    )
    return int(failed)

"""What `ftctl doctor` looks at: the command line, the versions, the job; and what a check says of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_core import plugins
from ft_core.cli import ask, flags
from ft_core.cli.ask import Line
from ft_core.cli.planner import shape as planner
from ft_core.errors import ConfigError, FtError
from ft_core.node.admission.findings import Finding
from ft_core.protocol.messages import JobStatus
from ft_core.settings import Settings

_LAUNCHERS = {
    "ftrun": "ftrun",
    "ft_core.cli.launch": "ftrun",
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
}
"""Programs and modules that a training command line begins with -> the launcher they are."""


@dataclass(frozen=True)
class Supported:
    """Versions of a distribution: the lowest that is supported, the highest that was tested.

    `broken`: first and last version of some between that are not to be used, and what they do.
    """

    lowest: tuple[int, int]
    highest: tuple[int, int]
    broken: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = ()


@dataclass(frozen=True)
class Framework:
    """What an adapter adds to `ftctl doctor`, by the entry point `ft_core.doctor`."""

    supported: Mapping[str, Supported]
    """By the distribution's name (docs/compatibility.md)."""
    protection: str
    """What a user gives a script so that it is protected."""
    protects: Callable[[Sequence[str]], tuple[bool, str] | None]
    """Whether a script with these arguments is protected, and by what, or why not; None: they do not say."""
    rivals: tuple[str, ...] = ()
    """Flags that have something else restart or kill workers."""
    launchers: Mapping[str, str] = field(default_factory=dict)
    """Programs that start its scripts -> the launcher they are."""


@dataclass(frozen=True)
class Case:
    """All that the checks are told; the machine they look at themselves. `root` is for their tests."""

    frameworks: Sequence[Framework] = ()
    planners: Sequence[planner.Framework] = ()
    """What `ftctl plan` knows of frameworks."""
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    launcher: str = ""
    """`ftrun`, `torchrun`, a framework's, or empty where the command line begins with the script."""
    arguments: Sequence[str] | None = None
    """The script's; None if no script is known."""
    settings: Settings | None = None
    standalone: bool = False
    """All nodes of the job are on this machine."""
    domain: str = ""
    """`--ft-domain` of this machine."""
    domain_from: str = ""
    """`--ft-domain-from`."""
    problem: str = ""
    """Why the command line cannot be run."""
    job_dir: Path | None = None
    controller: str = ""
    status: JobStatus | None = None
    """The controller's answer."""
    silence: str = ""
    """Why there is none."""
    line: Callable[[], AbstractContextManager[Line]] | None = None
    """Connects to the controller, for further questions."""
    root: Path = Path("/")

    @property
    def several_nodes(self) -> bool:
        """Whether the job spans more machines than this one, as far as is known."""
        return self.settings is not None and self.settings.nnodes > 1 and not self.standalone

    @property
    def world_size(self) -> int:
        """Workers of the job, 1 where that is not known."""
        return self.settings.world_size if self.settings is not None else 1

    @property
    def workers_here(self) -> int:
        """Workers on this machine, without standbys."""
        if self.settings is None:
            return max(1, self.gpus)
        nodes = self.settings.nnodes + self.settings.spares if self.standalone else 1
        return nodes * self.settings.nproc_per_node


Check = Callable[[Case], Iterator[Finding]]
"""Says nothing where it has nothing to look at."""


def versions(frameworks: Iterable[Framework]) -> dict[str, str]:
    """Name -> version of what a recovery depends on, of what is installed here."""
    found = {"python": platform.python_version()}
    for name in ("torch", *(name for framework in frameworks for name in framework.supported)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    import torch  # slow; `ftctl status` does without

    with contextlib.suppress(Exception):  # a build without CUDA has no NCCL, and says so in several ways
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def case(job_dir: Path | None, controller: str, words: Sequence[str]) -> Case:
    """Everything there is to know about a command line, and about the job in `job_dir` or at `controller`."""
    import torch

    frameworks: Sequence[Framework] = plugins.load(plugins.DOCTOR)
    facts: dict[str, Any] = {
        "frameworks": frameworks,
        "planners": plugins.load(plugins.PLANNER),
        "environment": dict(os.environ),
        "versions": versions(frameworks),
        "gpus": torch.cuda.device_count(),
        **_command(words, frameworks),
    }
    named = bool(job_dir or controller)
    job_dir = job_dir or facts.get("job_dir")
    if job_dir is not None and (job_dir / "job.json").exists():
        try:
            settings = Settings.read(job_dir)
            facts |= {"settings": settings, "arguments": facts.get("arguments") or settings.command.arguments}
            controller = controller or settings.controller or ask.find(settings, job_dir)
        except FtError as error:
            facts["problem"] = str(error)
    elif facts.get("settings") is not None:
        controller = controller or facts["settings"].controller
    if controller.startswith("127."):
        facts["standalone"] = True
    facts |= {"job_dir": job_dir, "controller": controller}
    begun = job_dir is None or (job_dir / "events.jsonl").exists()
    if named and controller and begun and facts.get("launcher") != "ftrun":
        facts["line"] = lambda: ask.line(job_dir, controller)
        try:
            with ask.line(job_dir, controller) as found:
                facts["status"] = found.status()
        except (FtError, OSError) as error:
            facts["silence"] = str(error)
    return Case(**facts)


def _command(words: Sequence[str], frameworks: Iterable[Framework]) -> dict[str, Any]:
    """What a command line says: that of a launcher with a script, or a script with its arguments."""
    while words and (Path(words[0]).name.startswith("python") or words[0] == "-m"):
        words = words[1:]
    if not words:
        return {}
    launchers = _LAUNCHERS | {name: of for each in frameworks for name, of in each.launchers.items()}
    launcher = launchers.get(Path(words[0]).name, "")
    if launcher != "ftrun":
        return {"launcher": launcher, "arguments": list(words[1:])}
    try:
        args = flags.parse(words[1:])
    except ConfigError as error:
        return {"launcher": launcher, "problem": str(error)}
    about: dict[str, Any] = {
        "launcher": launcher,
        "arguments": args.command[1:],
        "standalone": args.standalone,
        "domain": args.ft_domain,
        "domain_from": args.ft_domain_from,
        "job_dir": args.job_dir,
    }
    try:
        return {**about, "settings": flags.settings_of(args)}
    except ConfigError as error:
        return {**about, "problem": str(error)}

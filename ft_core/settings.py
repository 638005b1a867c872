"""A job's settings, as `ftrun` writes them to `job.json` in the job directory for its other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_core import leadership
from ft_core.elastic.rules import INTERVENTIONS, Start
from ft_core.errors import ConfigError
from ft_core.protocol.domains import place

ANY_RANK = -2
"""In place of the number of a node that takes whichever place is free when the job begins."""
SECRET_ENV = "FT_JOB_SECRET"
SECRET_ADVICE = (
    "set it to the same on all nodes (`openssl rand -hex 32` makes one), or give --job-dir a directory that "
    "all of them see"
)
SHORTEST = 16
"""Bytes of a secret that is not guessed by who has heard a connection being made."""
SAVED = "saved"
"""The directory in the job directory that the newest version goes to where a job ends that has no other."""
JOB, SECRET, ID = "job.json", "secret", "id"
"""Files in the job directory: its settings; its secret; its id, where its controller has a fixed address."""
_WRITTEN = 2.0
"""Seconds in which another process writes the secret into the file that it has made for it."""
PREFLIGHT_OFF, PREFLIGHT_JOINING, PREFLIGHT_ALL = PREFLIGHTS = ("off", "joining", "all")
"""Who is checked before it is given roles: nobody; who joins a job or stands by; and all, before its first
step."""
POLICIES = ("wait", "shrink", "stop")
SNAPSHOTS = ("lean", "full")
STRAGGLERS = ("off", "report", "replace")
AUTO = -1
"""A number that is found out where it is needed."""
MOST_STEPS = 1000
"""Between two versions that are protected."""
WORDS = 10_000
"""That a controller is to hear in a second from all nodes together, while nothing happens."""
FLAGS = {
    "replicas": "--ft-replicas",
    "spares": "--spares",
    "policy": "--ft-policy",
    "lr_intervention": "--ft-lr-intervention",
    "snapshot": "--ft-snapshot",
    "durable_dir": "--ft-durable-dir",
    "durable_interval": "--ft-durable-interval",
    "stages": "--ft-pipeline-stages",
    "ready_standbys": "--ft-ready-standbys",
    "every": "--ft-every",
}
"""Settings that a script's own configuration may bring, and the flags of `ftrun` that say the same."""
ALIKE = (
    *("nnodes", "min_nodes", "nproc_per_node", "stages", "replicas", "ready_standbys", "policy"),
    *("lr_intervention", "snapshot", "every", "verify", "durable_interval", "heartbeat"),
)
"""Settings that all nodes of a job act by, and that must be the same on all, as the command must. Others are
a node's own, or those of whoever leads."""


@dataclass(frozen=True)
class Command:
    """What the user wants to run: a script, a module (`-m`) or any program (`--no-python`)."""

    target: str
    """Path of the script, name of the module, or the program."""
    arguments: list[str] = field(default_factory=list)
    """What comes after it on the command line."""
    module: bool = False
    """Whether `target` names a module, which is run as `python -m` would."""
    no_python: bool = False
    """Whether `target` is a program that takes the worker's place: nothing of it can be protected."""


@dataclass(frozen=True)
class Settings:
    """What every process of a job must know. Times in seconds.

    A job has `nnodes` times `nproc_per_node` roles, and as many workers; spares come on top.
    """

    nnodes: int
    """Nodes that train, once all are there (`--nnodes`, its MAX)."""
    nproc_per_node: int
    """Workers of each node (`--nproc-per-node`)."""
    command: Command
    """What each of them runs."""
    min_nodes: int = 0
    """With how many nodes the job starts (`--nnodes`, its MIN): the other replica groups join when nodes do.
    0: all."""
    stages: int = 1
    """Pipeline stages (`--ft-pipeline-stages`). They matter where a job starts with some of its replica
    groups."""
    controller: str = ""
    """The controller's address, host:port; empty where it is elected."""
    leadership: str = ""
    """Where its lease is kept then (`--ft-leadership`), see `ft_core.leadership.at`."""
    run_id: str = ""
    """The job's id (`--rdzv-id`), where it has one before it begins."""
    spares: int = 0
    """Nodes that stand by, without a role (`--spares`)."""
    ready_standbys: int = 0
    """Roles of each node of which a standby has the start-up behind it (`--ft-ready-standbys`); -1: as many
    as there is memory for, see `node.workers.standby_budget`."""
    replicas: int = 1
    """k: how many failure domains may be lost at once without losing state (`--ft-replicas`). 0 keeps no copy
    on another node."""
    policy: str = "wait"
    """With no spare left (`--ft-policy`): `wait` for a node to join, `shrink` by the replica group,
    `stop`."""
    lr_intervention: str = "sqrt"
    """What the learning rate does while replica groups are away (`--ft-lr-intervention`): `sqrt`, `linear` or
    `none`, see `ft_core.elastic.rules.lr_factor`."""
    snapshot: str = "lean"
    """What a version consists of (`--ft-snapshot`): `lean` leaves out what all roles together can derive from
    the rest, where that is known to give the same bits; `full` leaves out nothing."""
    every: int = AUTO
    """Steps from a version that is protected to the next (`--ft-every`): at most twice as many, less one, are
    done again. -1: 1, and as few more as there must be where steps would wait for copies."""
    verify: bool = False
    """Whether what several roles hold alike is compared, version by version (`--ft-verify`): see
    `control.decide.comparison`."""
    straggler: str = "report"
    """What is done about roles that are slow (`--ft-straggler`): nothing (`off`), they are named (`report`),
    or their nodes are taken out as well (`replace`)."""
    heartbeat: float = 0.5
    """Between two words of an agent to the controller."""
    heartbeats_missed: int = 20
    """How many make a node count as lost. Many: a process's death is known by its connection's end, and
    virtual machines stop for seconds."""
    quiesce_timeout: float = 60.0
    """How long a worker may take to leave its step before it is killed and replaced."""
    hang_after: float = 0.0
    """How long roles may wait for another before it is taken for hung (`--ft-hang-after`); 0: learned."""
    hang_limit: float = 600.0
    """The same where nothing is known of what they wait in; and how long a hang that nobody can explain lasts
    before it costs a restart (`--ft-hang-limit`)."""
    return_limit: float = 10.0
    """How long replica groups wait for the state of one that comes back (`--ft-return-limit`), before they go
    on without it."""
    strikes: int = 3
    """Failures that make a node one that is not used while there is another (`--ft-strikes`); 0: no number
    does."""
    strike_minutes: float = 60.0
    """For how long each of them counts."""
    durable_dir: str = ""
    """Where durable checkpoints are written and looked for (`--ft-durable-dir`): a directory that all nodes
    see."""
    durable_interval: int = 0
    """Steps between durable checkpoints (`--ft-durable-interval`); 0 writes none."""
    max_restarts: int = 3
    """How often in a row all scripts are started again, from storage, without a new step in between, before
    the job ends (`--max-restarts`). 0: what cannot be gone on from in place ends it at once."""
    shutdown_timeout: float = 20.0
    """Seconds that the newest version may take to storage when the job ends (`--shutdown-timeout`); and that
    workers which handle SIGTERM have before that, if it is one of those `given`."""
    redirects: int = 3
    """Which of a worker's streams go to files: 0 none, 1 stdout, 2 stderr, 3 both."""
    tee: int = 3
    """Which streams go to files and to the console of `ftrun` (`--tee`), by the same numbers."""
    log_prefix: bool = False
    """Whether a line on the console begins with the name of the node that it comes from."""
    local_ranks: list[int] = field(default_factory=list)
    """Whose output the console shows (`--local-ranks-filter`); empty: everybody's."""
    log_format: str = "text"
    """How the job's own processes log (`--ft-log-format`): `text` for people, `json` for programs."""
    inject: str = ""
    """Failures on purpose (`--ft-inject`), see `ft_core.process.inject`."""
    direct: int = 128
    """Nodes that the controller serves itself; of a larger job the others go through one of these
    (`--ft-direct-nodes`). 0: all."""
    http: str = "127.0.0.1:0"
    """Where the controller serves its metrics (`--ft-http`), host:port; of port 0, at a free one."""
    metrics: str = ""
    """Where agents serve theirs (`--ft-metrics-port`), host:port; empty: nowhere."""
    interfaces: list[str] = field(default_factory=list)
    """Where agents serve state (`--ft-interface`): names, patterns and subnets, of which a machine takes
    all that it has; empty: see `ft_core.net.interfaces`."""
    notices: list[str] = field(default_factory=list)
    """Who may announce that a node's machine is about to go (`--ft-notices`), see
    `ft_core.node.notices.which`."""
    preflight: str = "off"
    """Which nodes are checked before they are given roles (`--ft-preflight`): one of `PREFLIGHTS`."""
    hooks: list[list[str]] = field(default_factory=list)
    """What the controller runs when something happens (`--ft-on`): the event, and the words of a command. Not
    one of `FLAGS`: a script's settings come over the network, and nothing that does is executed."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set in every worker, as torchrun's own variables are."""
    given: list[str] = field(default_factory=list)
    """Those of `FLAGS` that were given to `ftrun`, which a script's own configuration cannot change; and
    `shutdown_timeout`, if it was."""

    @property
    def alike(self) -> dict[str, Any]:
        """What must be the same on all nodes of a job. A script may lie in another directory on each."""
        command, own = self.command, dataclasses.asdict(self)
        kind = ["-m"] * command.module + ["--no-python"] * command.no_python
        target = command.target if command.module else Path(command.target).name
        return {"command": [*kind, target, *command.arguments], **{name: own[name] for name in ALIKE}}

    @property
    def digest(self) -> str:
        """Stands for all that is `alike`, in a greeting: "command-rest"."""
        rest = self.alike
        command = rest.pop("command")
        return "-".join(
            hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16] for each in (command, rest)
        )

    def differences(self, job: Mapping[str, Any]) -> dict[str, str]:
        """By name, and in words, what is different from what is `alike` in a job."""
        own = self.alike
        return {
            name: _difference(name, own[name], job.get(name)) for name in own if own[name] != job.get(name)
        }

    @property
    def meeting(self) -> str:
        """Where the job's nodes find its controller: its address, or where its lease is kept."""
        return self.leadership or self.controller

    @property
    def world_size(self) -> int:
        """Number of roles, as of global ranks."""
        return self.nnodes * self.nproc_per_node

    @property
    def size(self) -> tuple[int, int, int]:
        """(nodes, spares included; roles; roles on a node)."""
        return self.nnodes + self.spares, self.world_size, self.nproc_per_node

    @property
    def silence_limit(self) -> float:
        """Seconds without a word after which a node counts as lost."""
        return self.heartbeat * self.heartbeats_missed

    @property
    def pulse(self) -> float:
        """Seconds between two words of a node, that it lives or what is new: in a large job not all say
        something in every heartbeat, but never so seldom that one which is lost makes a node suspicious."""
        return max(self.heartbeat, min(self.size[0] / WORDS, self.silence_limit / 8))

    @property
    def guarded(self) -> bool:
        """Whether spares are to take over at once from nodes that they guard: see `state.placement`."""
        return bool(self.ready_standbys)

    @property
    def first_nodes(self) -> int:
        """How many nodes the job starts with, spares not included."""
        return self.min_nodes or self.nnodes

    @property
    def start(self) -> Start:
        """Which of the roles the job starts with: all, unless `min_nodes` says otherwise."""
        return Start(self.world_size, self.stages, self.first_nodes * self.nproc_per_node // self.stages)

    def period(self, found: int) -> int:
        """Steps from a version that is protected to the next: `found`, unless a number is given."""
        return found if self.every == AUTO else self.every

    def configured(self, values: Mapping[str, Any], source: str) -> Settings:
        """These settings with `values` (keys as in `FLAGS`) in their place, which come from `source`.

        Raises ConfigError when they are no settings, contradict a flag of `ftrun`, or cannot work.
        """
        for name, value in values.items():
            if name not in FLAGS:
                raise ConfigError(f"{source}: there is no setting {name!r}; there are {', '.join(FLAGS)}")
            own = getattr(self, name)
            if type(value) is not type(own):  # not isinstance: true is no number
                raise ConfigError(f"{source}: {name} must be {type(own).__name__}, got {value!r}")
            is_open = name == "every" and own == AUTO
            if name in self.given and value != own and not is_open:
                raise ConfigError(
                    f"{FLAGS[name]} {own} of ftrun contradicts {source}, which says {name} {value}: "
                    "leave one of the two out, or make them equal"
                )
        changed = dataclasses.replace(self, **values)
        changed.check({name: f"{name} ({source})" for name in values})
        return changed

    def check(self, names: Mapping[str, str] | None = None) -> None:
        """Raise ConfigError for what cannot work together.

        `names`: of settings that did not come from their flag, how a message calls them.
        """
        name = {**FLAGS, "direct": "--ft-direct-nodes", "max_restarts": "--max-restarts", **(names or {})}
        if self.leadership:
            leadership.check(self.leadership)
        if self.strikes < 0 or self.strike_minutes <= 0:
            raise ConfigError(f"--ft-strikes {self.strikes}/{self.strike_minutes:g}: give N/MINUTES")
        for count in ("replicas", "spares", "direct", "max_restarts"):
            if getattr(self, count) < 0:
                raise ConfigError(f"{name[count]} {getattr(self, count)}: give a number of 0 or more")
        if self.ready_standbys < AUTO:
            raise ConfigError(f"{name['ready_standbys']} {self.ready_standbys}: give a number, or auto (-1)")
        if self.policy not in POLICIES:
            raise ConfigError(f"{name['policy']} {self.policy!r}: give {' or '.join(POLICIES)}")
        if self.every != AUTO and not 1 <= self.every <= MOST_STEPS:
            raise ConfigError(f"{name['every']} {self.every}: give 1 to {MOST_STEPS} steps, or auto (-1)")
        if self.every > 1 and self.policy == "shrink":
            raise ConfigError(
                f"{name['every']} {self.every} does not go with {name['policy']} shrink, where groups leave "
                "and come back by the step: leave it out, or give 1"
            )
        if self.lr_intervention not in INTERVENTIONS:
            raise ConfigError(
                f"{name['lr_intervention']} {self.lr_intervention!r}: give {' or '.join(INTERVENTIONS)}"
            )
        if self.snapshot not in SNAPSHOTS:
            raise ConfigError(f"{name['snapshot']} {self.snapshot!r}: give {' or '.join(SNAPSHOTS)}")
        if self.straggler not in STRAGGLERS:
            raise ConfigError(f"--ft-straggler {self.straggler!r}: give {', '.join(STRAGGLERS)}")
        if self.durable_interval < 0:
            raise ConfigError(f"{name['durable_interval']} {self.durable_interval} must be positive")
        if self.durable_interval and not self.durable_dir:
            raise ConfigError(f"{name['durable_interval']} needs {name['durable_dir']}")
        if self.min_nodes and self.policy != "shrink":
            raise ConfigError(
                f"--nnodes {self.min_nodes}:{self.nnodes} starts without some replica groups: that takes "
                f"{name['policy']} shrink, not {self.policy}"
            )
        first = self.first_nodes * self.nproc_per_node
        if self.stages < 1 or self.world_size % self.stages or first % self.stages:
            raise ConfigError(
                f"{name['stages']} {self.stages} must divide the number of workers, {self.world_size}, and "
                f"of those that the job starts with, {first}"
            )
        if self.replicas >= self.nnodes + self.spares > 1:
            raise ConfigError(
                f"{name['replicas']} {self.replicas} needs {self.replicas + 1} nodes or more; "
                f"there are {self.nnodes}" + f" and {self.spares} spares" * bool(self.spares)
            )

    def write(self, job_dir: Path) -> None:
        """Write `job.json` into the job directory. Raises OSError if it cannot be written."""
        put(job_dir / JOB, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, job_dir: Path) -> Settings:
        """Read `job.json`. Raises ConfigError saying what is wrong with the directory."""
        path = job_dir / JOB
        try:
            return cls.of(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a job's settings ({error}); give the directory of ftrun --job-dir"
            ) from None

    @classmethod
    def of(cls, data: dict[str, Any]) -> Settings:
        """As they were written. Raises KeyError and TypeError for what are none."""
        return cls(**{**data, "command": Command(**data["command"])})


def _difference(name: str, here: Any, there: Any) -> str:
    if not (isinstance(here, list) and isinstance(there, list)):
        return f"{name} is {here} here, and {there} in that job"
    begins = _common(here, there)
    ends = _common(here[begins:][::-1], there[begins:][::-1])
    shown = [" ".join(words[max(0, begins - 1) : len(words) - ends]) for words in (here, there)]
    return f"the {name} has {shown[0]!r} here, and {shown[1]!r} in that job"


def _common(one: list[Any], other: list[Any]) -> int:
    """How many words at the beginning are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def packed(settings: Settings, secret: bytes) -> bytes:
    """What each process of a job must know, see `process.handed`."""
    return json.dumps({"settings": dataclasses.asdict(settings), "secret": secret.decode()}).encode()


def known(job_dir: Path, handed: bytes | None) -> tuple[Settings, bytes]:
    """The job's settings and its secret: what was `handed` to this process, else what the job directory has.
    Raises ConfigError."""
    if handed is None:
        return Settings.read(job_dir), read_secret(job_dir)
    data = json.loads(handed)
    return Settings.of(data["settings"]), data["secret"].encode()


def put(path: Path, text: str) -> None:
    """Write a file that others may read, or write as well, at the same time: they have it whole. Raises
    OSError."""
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    beside.write_text(text)
    beside.replace(path)


def unique(node: str) -> str:
    """A name for a process that is node `node`: the next one, there or elsewhere, has another."""
    return f"{place(node)}+{secrets.token_hex(3)}"


def job_id(job_dir: Path, given: str) -> str:
    """The job's id: what was `given`, else what its directory has, else one that is drawn. From now on its
    directory has it. Raises ConfigError if one that was not given cannot be kept there."""
    path = job_dir / ID
    try:
        known = path.read_text().strip() if path.exists() else ""
        if found := given or known:
            if found == known:
                return found
        else:
            found = leadership.new_id()
        put(path, found + "\n")
    except OSError as error:
        if not given:
            raise ConfigError(f"{path}, the job's id, cannot be kept: {error.strerror}") from None
        return given
    return found


def read_id(job_dir: Path | None) -> str:
    """The job's id, where its directory has it; else empty."""
    with contextlib.suppress(OSError):
        return (job_dir / ID).read_text().strip() if job_dir is not None else ""
    return ""


def write_secret(job_dir: Path) -> bytes:
    """Put the job's secret into its directory, readable by the owner only, and take it out of the
    environment, which a script and its children have as well. Returns it.

    The secret comes from the environment when it is set there (so that many nodes agree without a
    shared directory), otherwise it is drawn. Raises ConfigError, and OSError if it cannot be written.
    """
    path, given = job_dir / SECRET, os.environ.get(SECRET_ENV)
    if given is not None and not given.strip():
        raise ConfigError(f"{SECRET_ENV} is set, and empty: set it to `openssl rand -hex 32`, or unset it")
    text = (given or secrets.token_hex(32)).strip()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # nodes that share the directory share the secret
        known = _written(path)
        if given is not None and known != text:
            raise ConfigError(
                f"{SECRET_ENV} is not the secret of {job_dir}: unset it, or give the directory of another job"
            ) from None
        text = known
    else:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    os.environ.pop(SECRET_ENV, None)
    return text.encode()


def _written(path: Path) -> str:
    """What is in the file, which another process may just have made."""
    end = time.monotonic() + _WRITTEN
    while not (text := path.read_text().strip()):
        if time.monotonic() > end:
            raise ConfigError(f"{path} is empty: remove it, or write the job's secret into it")
        time.sleep(0.05)
    return text


def read_secret(job_dir: Path | None) -> bytes:
    """The job's secret, from its directory or the environment. Raises ConfigError if there is none."""
    if text := os.environ.get(SECRET_ENV, "").strip():
        return text.encode()
    try:
        assert job_dir is not None
        return (job_dir / SECRET).read_text().strip().encode()
    except (AssertionError, OSError) as error:
        raise ConfigError(
            f"no job secret ({error}): give --job-dir of the job, or set {SECRET_ENV} to the content "
            "of its `secret` file"
        ) from None

"""Which failure domains this machine is in, as the cluster itself says it.

First `--ft-domain`, as it is. Else the levels that one of these tells: `--ft-domain-from`, a file or command
of the operator's; Slurm's topology; the labels of the Kubernetes node, where the pod has them. Behind those
the NVLink domain of the GPUs, and the machine itself as the narrowest level: one rack is no worse than none.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_core.errors import ConfigError
from ft_core.node.devices.fabric import nvlink_domain
from ft_core.protocol.domains import SEPARATOR

LABELS = "etc/podinfo/labels"
"""Where recipes/megatron/kubernetes.yaml has the pod's labels put, by the downward API."""
LEVELS = (
    "topology.kubernetes.io/zone",
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "oci.oraclecloud.com/rdma.hpc_island_id",
    "oci.oraclecloud.com/rdma.network_block_id",
    "oci.oraclecloud.com/rdma.local_block_id",
    "network.topology.nvidia.com/core",
    "network.topology.nvidia.com/spine",
    "network.topology.nvidia.com/leaf",
)
"""Labels of Kubernetes, of clouds and of NVIDIA's topology service that say where a node is, the widest
first. Behind them come those of racks, whoever gives them, and the NVLink domain."""
_RACK = re.compile(r"[^/]+/(?:.*[-.])?rack")
_CLIQUE = "nvidia.com/gpu.clique"
_LABEL = re.compile(r'([^=\s]+)="([0-9A-Za-z._-]+)"')
_NAME = re.compile(r"[!-.0-~]{1,100}(?:/[!-.0-~]{1,100}){0,9}")
"""A domain: words of visible characters, ten levels at most."""
_PATIENCE = 30.0
"""Seconds that a command, or the driver, may take."""


@dataclass(frozen=True)
class FailureDomain:
    """What is known of where this machine is."""

    levels: tuple[str, ...] = ()
    """What it is in, the widest first."""
    source: str = ""
    """Who says it, for people; empty where nobody does."""
    given: str = ""
    """The whole of it, where `--ft-domain` says it."""
    trouble: str = ""
    """What could not be asked, if so."""

    def of(self, place: str) -> str:
        """The domain of the node with that name, which is the narrowest level."""
        return self.given or SEPARATOR.join((*self.levels, place))


def find(
    given: str,
    asked: str,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    fabric: Callable[[], str] = nvlink_domain,
) -> FailureDomain:
    """`given`: by `--ft-domain`. `asked`: `--ft-domain-from`.

    Raises ConfigError for an answer of the operator's that is none; what else cannot be read says nothing.
    """
    if given:
        if not all(given.split(SEPARATOR)):
            raise ConfigError(f"--ft-domain {given!r}: a level has no name; give one such as row2/rack7")
        return FailureDomain(source="--ft-domain", given=given)
    levels: tuple[str, ...] = ()
    sources, trouble = [], ""
    if asked:
        levels = tuple(of_operator(asked, names(environ)).split(SEPARATOR))
        sources.append(f"--ft-domain-from {asked}")
    elif levels := of_slurm(environ):
        sources.append("SLURM_TOPOLOGY_ADDR")
    elif levels := of_labels(_read(root / LABELS)):
        sources.append(f"the labels in /{LABELS}")
    if not asked:
        clique = _in_time(fabric)
        if clique is None:
            trouble = f"the NVIDIA driver has not said within {_PATIENCE:.0f} s which NVLink domain this is"
        elif clique:
            levels = (*levels, clique)
            sources.append("the NVLink fabric")
    return FailureDomain(levels, " and ".join(sources), trouble=trouble)


def names(environ: Mapping[str, str]) -> list[str]:
    """What this machine may be called in an operator's file."""
    host = socket.gethostname()
    known = (environ.get("SLURMD_NODENAME"), environ.get("NODE_NAME"), host, host.partition(".")[0])
    return list(dict.fromkeys(name for name in known if name))


def of_slurm(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The switches above this machine, the widest first, or what else Slurm's topology consists of.

    SLURM_TOPOLOGY_ADDR is `spine.leaf[3-4].node7`, and SLURM_TOPOLOGY_ADDR_PATTERN says what each part is:
    `switch.switch.node`. Where the cluster has no topology there is the node alone.
    """
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    # A node's name may have dots, and is the last part.
    parts = address.split(".", len(kinds) - 1) if len(kinds) > 1 else address.split(".")
    if len(kinds) > 1 and (len(parts) != len(kinds) or kinds[-1] != "node"):
        return ()
    own = environ.get("SLURMD_NODENAME")
    if own and parts[-1] != own:
        return ()  # it was said of another machine, and handed on
    return tuple(_word(part) for part in parts[:-1])


def of_labels(text: str) -> tuple[str, ...]:
    """The levels among labels as the downward API writes them, a line `key="value"` each."""
    lines = (_LABEL.fullmatch(line.strip()) for line in text.splitlines())
    labels = {found[1]: found[2] for found in lines if found}
    keys = [*LEVELS, *sorted(key for key in labels if _RACK.fullmatch(key)), _CLIQUE]
    return tuple(labels[key] for key in keys if key in labels)


def of_operator(asked: str, known_as: Collection[str]) -> str:
    """What a file says of this machine, in a line `NODE DOMAIN`, or a command prints. Raises ConfigError."""
    path, flag = Path(asked), f"--ft-domain-from {asked}"
    if path.is_file() and not os.access(path, os.X_OK):
        try:
            text = path.read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flag}: the file cannot be read: {error}") from None
        return _line(text, flag, known_as)
    try:
        done = subprocess.run(
            shlex.split(asked), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{flag}: the command has not answered within {_PATIENCE:.0f} s; run it on this machine to see "
            "why, or give --ft-domain"
        ) from None
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{flag}: this is neither a file nor a command here: {error}") from None
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(
            f"{flag}: the command ended with code {done.returncode}: {said or 'it says nothing'}"
        )
    return _checked(done.stdout.strip(), f"{flag}: the command printed {done.stdout.strip()[:80]!r}")


def _line(text: str, flag: str, known_as: Collection[str]) -> str:
    found = ""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ConfigError(f"{flag}, line {number}: {line.strip()[:80]!r}: give NODE DOMAIN")
        if words[0] in known_as:
            domain = _checked(words[1], f"{flag}, line {number}: {words[1][:80]!r}")
            if found and found != domain:
                raise ConfigError(f"{flag}, line {number}: {words[0]} is in {domain}, and in {found} before")
            found = domain
    if not found:
        raise ConfigError(f"{flag}: there is no line for this machine, {' or '.join(known_as)}: add one")
    return found


def _checked(text: str, where: str) -> str:
    if not _NAME.fullmatch(text):
        raise ConfigError(f"{where}: this is no failure domain; give one such as rack7, or row2/rack7")
    return text


def _word(text: str) -> str:
    """Fit to be a level."""
    return re.sub(r"[^!-.0-~]", "_", text) or "_"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _in_time(ask: Callable[[], str]) -> str | None:
    """The answer; None if it takes too long: a call into a driver that hangs cannot be ended."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answers[0] if answers else None

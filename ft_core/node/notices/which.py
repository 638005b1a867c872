"""Whom to ask: what `--ft-notices` names, or whoever is there."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from ft_core.errors import ConfigError
from ft_core.leadership.kubernetes import ACCOUNT, bearer
from ft_core.node.notices.clouds import Aws, Azure, Gcp
from ft_core.node.notices.clusters import Kubernetes, Slurm
from ft_core.node.notices.http import Server
from ft_core.node.notices.notice import Source, shared
from ft_core.node.notices.operators import Command, File
from ft_core.protocol.domains import place
from ft_core.protocol.sockets import split_address

AUTO, NONE = "auto", "none"
NAMES = (AUTO, NONE, "aws", "gcp", "azure", "slurm", "kubernetes")
ADDRESS = "FT_METADATA"
"""HOST:PORT of a metadata service in place of the clouds' own."""
_METADATA = "169.254.169.254:80"
_DMI = "sys/class/dmi/id"
_SAYS = {
    "aws": ("Amazon EC2", "amazon"),
    "gcp": ("Google",),
    "azure": ("7783-7084-3265-9085-8269-3286-77",),
}
"""What the firmware of a cloud's machines says of itself: nobody else need be asked where no cloud is."""
_FIRMWARE = ("sys_vendor", "bios_vendor", "bios_version", "product_name", "chassis_asset_tag")


def parse(given: Sequence[str]) -> list[str]:
    """The values of `--ft-notices`, each a name, `file:PATH` or `command:WORDS`. Raises ConfigError."""
    for one in given:
        kind, _, rest = one.partition(":")
        if one in NAMES or (kind == "file" and rest):
            continue
        try:
            good = kind == "command" and bool(shlex.split(rest))
        except ValueError as error:
            raise ConfigError(f"--ft-notices {one!r}: {error}") from None
        if not good:
            names = ", ".join(NAMES)
            raise ConfigError(f"--ft-notices {one!r}: give {names}, file:PATH or command:WORDS")
    if NONE in given and len(given) > 1:
        raise ConfigError("--ft-notices none excludes all others")
    # A path is the same for all processes, wherever they run.
    return [f"file:{Path(one[5:]).absolute()}" if one.startswith("file:") else one for one in given]


def sources(
    wanted: Sequence[str],
    node: str,
    nodes: int,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> list[tuple[str, Source, bool]]:
    """Whom to ask on node `node` of so many: name, source, and whether the operator has named it.

    Raises ConfigError where one that was named cannot be asked here.
    """
    named = [name for name in wanted if name not in (AUTO, NONE)]
    found = [name for name in _there(environ, root) if name not in named] if AUTO in wanted else []
    made = []
    for name in [*named, *found]:
        made += [(name, source, name in named) for source in _made(name, node, nodes, environ, root)]
    return made


def _there(environ: Mapping[str, str], root: Path) -> list[str]:
    """Who says what without being asked for: the cloud that has made this machine, and Slurm."""
    said = ""
    for name in _FIRMWARE:
        try:
            said += (root / _DMI / name).read_text(errors="replace")
        except OSError:
            continue
    found = [cloud for cloud, words in _SAYS.items() if any(word in said for word in words)]
    return found + ["slurm"] * bool(environ.get("SLURM_JOB_ID") and shutil.which("scontrol"))


def _made(name: str, node: str, nodes: int, environ: Mapping[str, str], root: Path) -> list[Source]:
    kind, _, rest = name.partition(":")
    if kind == "slurm":
        return [
            Slurm(environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0], shared(nodes))
        ]
    if kind == "kubernetes":
        return [_kubernetes(nodes, environ, root)]
    if kind == "file":
        return [File(rest, _names(node, environ))]
    if kind == "command":
        return [Command(rest, _names(node, environ))]
    try:
        server = Server(*split_address(environ.get(ADDRESS) or _METADATA))
    except ValueError:
        raise ConfigError(f"{ADDRESS} {environ[ADDRESS]!r}: give HOST:PORT") from None
    if kind == "aws":
        return [Aws(server)]
    if kind == "azure":
        return [Azure(server)]
    server = server._replace(name="metadata.google.internal")
    return [Gcp(server, "preempted"), Gcp(server, "maintenance-event")]


def _kubernetes(nodes: int, environ: Mapping[str, str], root: Path) -> Kubernetes:
    account = root / ACCOUNT.relative_to("/")
    host, port = (environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    try:
        namespace = (account / "namespace").read_text().strip()
        bearer(account)
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        server = Server(host, split_address(f"[{host}]:{port}")[1], tls)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ft-notices kubernetes: this process is in no pod with a service account ({error}); set "
            "automountServiceAccountToken"
        ) from None
    pod = environ.get("POD_NAME") or socket.gethostname()
    return Kubernetes(server, lambda: bearer(account), namespace, pod, shared(nodes))


def _names(node: str, environ: Mapping[str, str]) -> list[str]:
    """What this machine may be called by an operator."""
    host, name = socket.gethostname(), place(node)
    known = name, node, environ.get("SLURMD_NODENAME"), environ.get("NODE_NAME"), host, host.partition(".")[0]
    return list(dict.fromkeys(each for each in known if each))

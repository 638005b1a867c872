"""A cluster on one machine: nodes that are namespaces, and networks that join them.

A node has a host name, processes, mounts, IPC, clocks and a network of its own: no process of another node
is in its /proc, no socket of another node can be reached but by an address, and /tmp, /run, /dev/shm and the
home directory are its own. Of the machine it sees the rest of the file system: Python, and the repository.
Each of its interfaces is one end of a veth pair, whose other end is in a router, in namespaces as well.

It takes root, and a kernel with namespaces, veth and tbf: `missing` says what there is not. Nothing has a
name outside, and all that a cluster is ends with the process that has made it, killed or not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
DISK, SHARED = Path("/mnt/disk"), Path("/mnt/shared")
"""Where a node finds its own disk, and the directory that all nodes share, if there is one."""
NETWORKS = 80
"""The number of the first network, in addresses."""

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "env")
# The end of the process that starts it ends `unshare`, and that ends the first process there, and so all.
_HOLDER = [
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--ipc",
    "--pid",
    "--fork",
]
_HOLDER += ["--kill-child", "--mount-proc", "--time"]
_READY = "ready"
_STAYS = f"trap '' CHLD; echo {_READY}; exec sleep infinity >/dev/null 2>&1"
"""Last words of what sets a machine up: with SIGCHLD ignored, nothing that ends there stays a zombie."""

_ROUTER = {
    "net/ipv4/ip_forward": 1,
    "net/ipv6/conf/all/forwarding": 1,
    "net/ipv6/conf/all/keep_addr_on_down": 1,
}
_NODE = {
    # A route whose cable is out is not used, as where a network manager looks after that.
    "net/ipv4/conf/all/ignore_routes_with_linkdown": 1,
    "net/ipv6/conf/all/ignore_routes_with_linkdown": 1,
    "net/ipv6/conf/default/ignore_routes_with_linkdown": 1,
}


@functools.cache
def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid():
        return "a cluster of namespaces needs root"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"a cluster of namespaces needs {' and '.join(absent)} (iproute2, util-linux)"
    tried = [*_set(_ROUTER), "mount -t tmpfs tmpfs /mnt", "ip link add name eth0 type veth peer name eth1"]
    tried += ["tc qdisc add dev eth0 root tbf rate 1gbit burst 1mb latency 1s"]
    done = subprocess.run([*_HOLDER, "sh", "-ec", "\n".join(tried)], capture_output=True, text=True)
    return f"no namespaces, veth, IPv6 or tbf: {done.stderr.strip()[-200:]}" if done.returncode else ""


def _set(settings: Mapping[str, int]) -> list[str]:
    return [f"echo {value} >/proc/sys/{name}" for name, value in settings.items()]


class _Namespaces:
    """What one machine of the cluster is. All that runs in it ends with it."""

    def __init__(self, setup: Sequence[str], clock: int = 0) -> None:
        """`setup`: shell commands that are run in it first. `clock`: seconds that its clocks are ahead, but
        for that of the day. Raises RuntimeError if a command fails."""
        clocks = [f"--monotonic={clock}", f"--boottime={clock}"]
        self._holder = subprocess.Popen(
            [*_HOLDER, *clocks, "sh", "-ec", "\n".join(["ip link set lo up", *setup, _STAYS])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            if (first := said.readline().strip()) != _READY:
                raise RuntimeError(f"no namespaces: {first} {said.read()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text().split()[0])
        """Of its first process, as it is known outside."""

    def command(self, *argv: str | Path, only: str = "-nmuipT") -> list[str]:
        """What runs `argv` in it, or in `only` some of its namespaces, as `nsenter` calls them."""
        return ["nsenter", "-t", str(self.pid), *(f"-{each}" for each in only[1:]), "--", *map(str, argv)]

    def ip(self, *lines: str) -> None:
        """Commands of `ip`, one after the other."""
        subprocess.run(
            self.command("ip", "-batch", "-", only="-n"), input="\n".join(lines), text=True, check=True
        )

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait()


class Cluster:
    """Some nodes, and the networks between them. Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        *,
        ipv4: bool = True,
        ipv6: bool = True,
        networks: int = 2,
        rate: str = "",
        shm: str = "1g",
        shared: bool = False,
        loopback: bool = False,
    ) -> None:
        """`directory`: for the nodes' disks, and what they share if that is `shared`. Nodes have an interface
        in each of the `networks`, which passes `rate` (as `tc` has it: "100mbit") each way. `shm`: the size
        of /dev/shm. `loopback`: a node's own name is its loopback, as Debian has it in /etc/hosts."""
        self.directory, self.networks, self.rate, self.shm = directory, networks, rate, shm
        self.ipv4, self.ipv6, self.loopback = ipv4, ipv6, loopback
        self.shared = directory / "shared" if shared else None
        if self.shared is not None:
            self.shared.mkdir()
        self._booted = 0
        self.nodes: list[Node] = []
        self.router = _Namespaces(_set(_ROUTER))
        try:
            for number in range(nodes):
                self.nodes.append(Node(self, f"node{number}"))
                self.nodes[-1].boot()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """All that runs on it is killed."""
        for node in self.nodes:
            node.end()
        self.router.end()

    def number(self) -> int:
        """For a node's addresses: another one each time."""
        self._booted += 1
        return self._booted

    def write_names(self) -> None:
        """All nodes know the names of all."""
        for node in self.nodes:
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            for other in self.nodes:
                own = [("127.0.1.1" if self.ipv4 else "::1")] if self.loopback and other is node else []
                lines += [f"{address} {other.name}" for address in own or other.addresses()]
            node.hosts.write_text("\n".join([*lines, ""]))  # into the same file, since that is mounted


class Node:
    """One of its machines."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        """`boot` begins it."""
        self.cluster, self.name, self._number = cluster, name, 0
        self._etc = cluster.directory / name / "etc"
        self.disk, self.hosts = cluster.directory / name / "disk", self._etc / "hosts"
        """Its disk, as it is seen outside."""
        for directory in (self._etc, self.disk):
            directory.mkdir(parents=True)
        self.disk.chmod(0o1777)
        for file, text in (("hosts", ""), ("hostname", f"{name}\n"), ("resolv.conf", "")):
            (self._etc / file).write_text(text)
        self._namespaces: _Namespaces | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def addresses(self, network: int = 0) -> list[str]:
        """In one of the networks, IPv4 before IPv6."""
        four = [f"10.{NETWORKS + network}.{self._number}.2"] if self.cluster.ipv4 else []
        return four + [f"fd00:{NETWORKS + network}:{self._number}::2"] * self.cluster.ipv6

    # -- its life ----------------------------------------------------------------------------------

    def boot(self) -> None:
        """Begin; after `kill` begin anew, with other addresses, and what is on its disk."""
        assert self._namespaces is None, f"{self.name} runs"
        self._number = self.cluster.number()
        off = int(not self.cluster.ipv6)
        system = _NODE | {f"net/ipv6/conf/{which}/disable_ipv6": off for which in ("all", "default")}
        self._namespaces = _Namespaces([*self._mounts(), *_set(system)], 10_000 * self._number)
        for network in range(self.cluster.networks):
            self._connect(network)
        self.cluster.write_names()

    def _mounts(self) -> list[str]:
        kept = dict.fromkeys(map(str, (ROOT, sys.prefix, sys.base_prefix)))  # wherever below these they are
        own = {"/tmp": "1777", "/run": "755", os.path.expanduser("~"): "755"}
        own["/dev/shm"] = f"1777,size={self.cluster.shm}"
        lines = [f"echo {self.name} >/proc/sys/kernel/hostname", "mount -t tmpfs tmpfs /mnt"]
        for number, path in enumerate(kept):
            lines += [f"mkdir /mnt/{number}", f"mount --rbind {quote(path)} /mnt/{number}"]
        places = {DISK: self.disk} | ({SHARED: self.cluster.shared} if self.cluster.shared else {})
        for place, source in places.items():
            lines += [f"mkdir {place}", f"mount --bind {quote(str(source))} {place}"]
        for file in self._etc.iterdir():
            lines.append(f"mount --bind {quote(str(file))} $(realpath /etc/{file.name})")
        lines += [f"mount -t tmpfs -o mode={options} tmpfs {place}" for place, options in own.items()]
        for number, path in enumerate(kept):
            lines += [f"mkdir -p {quote(path)}", f"mount --move /mnt/{number} {quote(path)}"]
        lines.append(f"cd /mnt && rmdir {' '.join(map(str, range(len(kept))))}")
        return lines

    def _connect(self, network: int) -> None:
        """An interface in one of the networks. What goes elsewhere leaves by the first one that is up."""
        here, there = f"eth{network}", self._at_router(network)
        self.cluster.router.ip(f"link add {there} type veth peer name {here} netns {self._here.pid}")
        mine, others, routes = [f"link set {here} up"], [f"link set {there} up"], []
        for address in self.addresses(network):
            gateway = f"{address[:-1]}1"
            size, default, net = "/24", "0.0.0.0/0", f"10.{NETWORKS + network}.0.0/16"
            if ":" in address:
                size, default, net = "/64 nodad", "::/0", f"fd00:{NETWORKS + network}::/32"
            mine.append(f"address add {address}{size} dev {here}")
            others.append(f"address add {gateway}{size} dev {there}")
            routes.append(f"route add {net} via {gateway} dev {here}")
            routes.append(f"route add {default} via {gateway} dev {here} metric {1000 + network}")
        self.cluster.router.ip(*others)
        self._here.ip(*mine, *routes)
        for namespaces, name in ((self._here, here), (self.cluster.router, there)):
            if self.cluster.rate:
                limit = f"qdisc add dev {name} root tbf rate {self.cluster.rate} burst 256kb latency 100ms"
                subprocess.run(namespaces.command("tc", *limit.split(), only="-n"), check=True)

    def kill(self) -> None:
        """As if its power failed: nobody hears another word of it."""
        self._at_links("delete")
        self.end()

    def end(self) -> None:
        """All that runs on it is killed."""
        namespaces, self._namespaces = self._namespaces, None
        if namespaces is not None:
            namespaces.end()
        for process in self._started:
            process.wait()
        self._started = []

    # -- its links ---------------------------------------------------------------------------------

    def link_down(self, *networks: int) -> None:
        """The cables of these interfaces are out; of all, if none is named."""
        self._at_links("set", "down", networks)

    def link_up(self, *networks: int) -> None:
        """They are in again."""
        self._at_links("set", "up", networks)

    def _at_links(self, command: str, how: str = "", networks: Sequence[int] = ()) -> None:
        named = networks or range(self.cluster.networks)
        self.cluster.router.ip(*(f"link {command} {self._at_router(each)} {how}" for each in named))

    def _at_router(self, network: int) -> str:
        return f"to{self._number}net{network}"

    # -- what runs on it ---------------------------------------------------------------------------

    @property
    def _here(self) -> _Namespaces:
        assert self._namespaces is not None, f"{self.name} does not run"
        return self._namespaces

    def run(
        self,
        *argv: str | Path,
        env: Mapping[str, str] | None = None,
        user: int = 0,
        output: IO[Any] | int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program there, in the repository's root. `user`: a number, which needs to be nobody's, and
        its group's. `output`: where goes what it prints. Its exit code is that of what is returned."""
        as_user = [f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        process = subprocess.Popen(
            self._here.command("setpriv", *as_user, "env", f"--chdir={ROOT}", "--", *argv),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output if output is None else subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

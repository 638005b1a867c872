"""A real etcd of several members on loopback, where Debian's `etcd-server` is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from ft_core.leadership.base import LeadershipError
from ft_core.leadership.etcd import Etcd
from ft_core.protocol.sockets import reserve


class Members:
    """Use as a context manager: nothing of them is left behind."""

    def __init__(self, count: int = 3, *flags: str) -> None:
        self._flags = flags
        self._directory = Path(tempfile.mkdtemp(prefix="ft-etcd-"))
        self._reserved = [reserve("127.0.0.1") for _ in range(2 * count)]
        ports = [each.getsockname()[1] for each in self._reserved]
        self.servers = [("127.0.0.1", port) for port in ports[:count]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[count:]]
        self._processes = [self._start(number) for number in range(count)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        host, port = self.servers[number]
        mine, client = self._peers[number], f"http://{host}:{port}"
        command = ["etcd", "--name", f"m{number}", "--data-dir", f"{self._directory}/m{number}"]
        command += ["--listen-peer-urls", mine, "--initial-advertise-peer-urls", mine]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        all_of_them = ",".join(f"m{at}={peer}" for at, peer in enumerate(self._peers))
        command += ["--initial-cluster", all_of_them, "--unsafe-no-fsync", *self._flags]
        with (self._directory / f"log{number}").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output)

    def __enter__(self) -> Members:
        end = time.monotonic() + 60
        while True:
            try:
                self.leadership("there").look()
                return self
            except LeadershipError as error:
                if time.monotonic() > end:
                    self.__exit__()
                    raise AssertionError(f"etcd does not answer: {error}") from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for each in self._reserved:  # until now, or somebody else might be given one while a member starts
            each.close()
        shutil.rmtree(self._directory)

    def kill(self, number: int) -> None:
        """SIGKILL for one of them."""
        self._processes[number].kill()
        self._processes[number].wait()

    def start(self, number: int) -> None:
        """One that was killed, again."""
        self._processes[number] = self._start(number)

    def leads(self, number: int) -> bool:
        """Whether it is the one of them that orders what is written."""
        host, port = self.servers[number]
        asked = urllib.request.Request(f"http://{host}:{port}/v3/maintenance/status", b"{}", method="POST")
        with urllib.request.urlopen(asked, timeout=5) as answer:
            status = json.load(answer)
        return bool(status["leader"] == status["header"]["member_id"])

    def place(self, name: str) -> str:
        """As `--ft-leadership` names it."""
        return f"etcd://{','.join(f'{host}:{port}' for host, port in self.servers)}/{name}"

    def leadership(self, name: str, job: str = "a job") -> Etcd:
        """Another client of theirs."""
        return Etcd(list(self.servers), name, job, nodes=3)

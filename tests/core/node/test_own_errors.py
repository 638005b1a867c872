"""An error of an agent's or a controller's own is not taken for a lost connection, and does not go unseen."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core.fleet import Fleet, play
from core.plans import messages_of, plan_of
from core.real_agent import RealAgent
from harness import environment
from ports import free_port
from processes import children

from ft_core.cli.launcher import Launcher
from ft_core.control.shell import Shell
from ft_core.errors import FAILED_NOTE, AuthenticationError, ProtocolError
from ft_core.process import refusals
from ft_core.process.async_writer import console
from ft_core.process.tasks import Tasks
from ft_core.protocol import acceptor
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.channel import Channel
from ft_core.protocol.connection import Connection
from ft_core.protocol.messages import (
    FROM_CLIENT,
    FROM_CONTROLLER,
    TO_CTL,
    AgentHello,
    AskStatus,
    CtlHello,
    Denied,
    FromAgent,
    FromCtl,
    Heartbeat,
    Holdings,
    HoldingsChanged,
    Idle,
    Inject,
    JobStatus,
    LeaderHello,
    NodePlan,
    RoleLayout,
    RouteRequest,
    Shutdown,
    ToCtl,
    UseRelay,
    Welcome,
)
from ft_core.protocol.sockets import listen, reserve
from ft_core.settings import Command, Settings, read_secret, write_secret

HELLO = AgentHello(
    "x", 1, 0, 0, "x", "x:1", Holdings(0, "", 0, [], {}, {}, {}, 2, "x:1", "x:1", None), [], False, ""
)
POISON = RoleLayout(1, 0, adopted=False, segments={}, initial=0, resumes=False, group=None)
"""A message that its handler does not expect."""


def job(job_dir: Path, port: int, **more: Any) -> Settings:
    """A job of one node whose workers never come to a role."""
    script = job_dir.parent / "train.py"
    script.write_text("")
    settings = Settings(1, 1, Command(str(script)), controller=f"127.0.0.1:{port}", replicas=0, **more)
    job_dir.mkdir()
    settings.write(job_dir)
    write_secret(job_dir)
    return settings


class Agent:
    """A real agent's process, and whoever is at its controller's port."""

    def __init__(self, job_dir: Path, **more: Any) -> None:
        self.sock = listen("127.0.0.1")
        self.settings = job(job_dir, self.sock.getsockname()[1], **more)
        self.job_dir, self.secret = job_dir, read_secret(job_dir)
        self.errors = job_dir.parent / "agent.err"
        command = [sys.executable, "-m", "ft_core.node", "--job-dir", str(job_dir), "--node", "node0"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--node-rank", "0"], env=environment(), stderr=errors, start_new_session=True
            )

    async def connections(self) -> AsyncIterator[Connection]:
        """One after the other, as the agent makes them."""
        found: asyncio.Queue[Connection] = asyncio.Queue()
        server = asyncio.create_task(acceptor.serve(self.sock, self.secret, "a test", found.put))
        try:
            while True:
                async with asyncio.timeout(60):
                    yield await found.get()
        finally:
            server.cancel()

    def ends(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.sock.close()


@pytest.fixture
def agent(tmp_path: Path):
    found = Agent(tmp_path / "job")
    yield found
    found.close()


def test_an_agent_that_cannot_do_what_it_is_told_ends_with_the_traceback(agent: Agent):
    async def controller() -> None:
        async for connection in agent.connections():
            channel, _ = await ready(agent, connection)
            for message in messages_of(plan(agent, master="nowhere")):
                channel.post(message)
            with pytest.raises(ConnectionError):
                while True:
                    await channel.recv()
            return

    asyncio.run(controller())
    assert agent.ends() == -signal.SIGKILL
    said = agent.errors.read_text()
    assert "node node0 fails, and is lost to the job" in said and "ValueError: not an address" in said


def test_the_end_of_the_fork_server_is_not_the_end_of_the_script(agent: Agent):
    """It takes down the pipes by which the end of workers is told, though they may live."""
    Path(agent.settings.command.target).write_text("import time; time.sleep(1000)")
    heard: list[FromAgent | FromCtl | RouteRequest] = []

    async def controller() -> None:
        async for connection in agent.connections():
            channel, message = await ready(agent, connection)
            for message in messages_of(plan(agent, master="127.0.0.1:2")):
                channel.post(message)
            while not (isinstance(message, Heartbeat) and message.roles):
                message = await channel.recv()
            for left in fork_servers(agent):
                os.kill(left, signal.SIGKILL)
            with pytest.raises(ConnectionError):
                while True:
                    heard.append(await channel.recv())
            return

    asyncio.run(controller())
    assert agent.ends() == -signal.SIGKILL
    said = agent.errors.read_text()
    assert "node node0 fails, and is lost to the job: its fork server has ended" in said
    assert "Traceback" not in said
    assert set(map(type, heard)) <= {Heartbeat, HoldingsChanged, Idle}


def test_workers_that_end_at_once_cost_no_node(agent: Agent):
    """To start another in the place of the first is to hear how the second has ended."""

    async def controller() -> None:
        async for connection in agent.connections():
            channel, message = await ready(agent, connection)
            [server] = fork_servers(agent)
            before = set(children(server))
            agent.process.send_signal(signal.SIGSTOP)
            for worker in before:
                os.kill(worker, signal.SIGKILL)
            while before & set(children(server)):
                await asyncio.sleep(0.01)  # until the fork server has told
            agent.process.send_signal(signal.SIGCONT)
            while len(set(children(server)) - before) < 2:
                message = await channel.recv()
            while not (isinstance(message, Heartbeat | Idle) and message.idle == 2):
                message = await channel.recv()
            return

    asyncio.run(controller())
    assert "fails" not in agent.errors.read_text()


async def ready(
    agent: Agent, connection: Connection
) -> tuple[AsyncChannel[FromAgent | FromCtl | RouteRequest], FromAgent | FromCtl | RouteRequest]:
    """The agent's connection once both of its workers wait for a role, and its newest message."""
    channel = await AsyncChannel.accept(connection, agent.secret, FROM_CLIENT)
    channel.post(UseRelay(""))
    channel.post(LeaderHello(1, "a", ""))
    message = await channel.recv()
    while not (isinstance(message, Heartbeat | Idle) and message.idle == 2):
        message = await channel.recv()
    return channel, message


def plan(agent: Agent, master: str) -> NodePlan:
    """Of the first epoch, for one node and one role."""
    return plan_of(agent.settings, {0: "node0"}, lambda role: f"{role}x1-0", master)


def fork_servers(agent: Agent) -> list[int]:
    return [pid for pid in children(agent.process.pid) if "forkserver" in command_line(pid)]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_whatever_answers_at_the_controllers_port_costs_no_node(agent: Agent):
    """Other services, one that hangs up, and a job with another secret, while the controller is away."""
    services = [b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(200), b"SSH-2.0-x\r\n", b""]
    answers = [*services, "controller", *services, "another job", "controller"]

    async def port() -> None:
        async for connection in agent.connections():
            answer = answers.pop(0)
            if isinstance(answer, bytes):
                connection.write(answer)
            elif answer == "another job":
                with pytest.raises(AuthenticationError):
                    await AsyncChannel.accept(connection, b"another job's secret", FROM_CLIENT)
            else:
                channel = await AsyncChannel.accept(connection, agent.secret, FROM_CLIENT)
                assert isinstance(await channel.recv(), RouteRequest)
                channel.post(UseRelay(""))
                assert isinstance(await channel.recv(), AgentHello)
            connection.close()
            if not answers:
                return

    asyncio.run(port())
    assert agent.process.poll() is None


def test_an_agent_with_the_wrong_secret_leaves_before_the_job_runs(agent: Agent):
    async def port() -> None:
        async for connection in agent.connections():
            with pytest.raises(AuthenticationError):
                await AsyncChannel.accept(connection, b"another job's secret", FROM_CLIENT)
            return

    asyncio.run(port())
    assert agent.ends() == 2
    assert "check the job's secret file" in agent.errors.read_text()


def test_a_client_tells_another_service_from_another_secret():
    with listen("127.0.0.1") as sock:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = sock.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request".ljust(100))
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ProtocolError, match="does not speak this protocol"):
            Channel.connect(f"127.0.0.1:{sock.getsockname()[1]}", b"secret", FROM_CONTROLLER, 60.0)
        thread.join()


def test_a_controller_that_fails_is_replaced_and_fails_for_good_when_it_meets_the_same_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    settings = job(tmp_path / "job", free_port())
    launcher = Launcher(tmp_path / "job")
    over = threading.Event()
    codes: list[int] = []

    def node() -> None:
        """Says the same to each controller that it meets."""
        while not over.is_set():
            with contextlib.suppress(OSError):
                channel = Channel.connect(
                    settings.controller, read_secret(tmp_path / "job"), FROM_CONTROLLER, 60.0
                )
                channel.send(HELLO)
                channel.recv()
                channel.send(POISON)
                with contextlib.suppress(ConnectionError):
                    while True:
                        if isinstance(message := channel.recv(), Shutdown):
                            codes.append(message.code)
                channel.close()
            time.sleep(0.02)

    thread = threading.Thread(target=node)
    thread.start()
    try:
        launcher.controller()
        assert launcher.wait() == 1
    finally:
        over.set()
        launcher.stop()
        thread.join()
    said = capfd.readouterr().err
    assert said.count("AssertionError: role 0 tells of its state") == 3, "a traceback of each"
    assert "ftrun: the job stops: 3 controllers in a row have failed, this one of AssertionError(" in said
    assert codes == [1], "the nodes were not told"


def test_a_controller_whose_machine_cannot_even_end_the_job_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The next one would fail as well, and so on without end."""
    settings = job(tmp_path / "job", free_port())
    shell, before = Shell(settings, tmp_path / "job", failed_before=2), signal.getsignal(signal.SIGTERM)

    def handle(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(shell.machine, "handle", handle)
    try:
        assert asyncio.run(shell.run()) == 1
    finally:
        signal.signal(signal.SIGTERM, before)  # a controller that ends ignores it
    assert "ftrun: the job stops: its controller fails" in capfd.readouterr().err


def test_a_job_of_one_node_ends_where_torch_cannot_be_imported(tmp_path: Path):
    """Of which the agent, which has no use for torch, hears by its fork server."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    (tmp_path / "train.py").touch()
    about = environment()
    about["PYTHONPATH"] = os.pathsep.join([str(tmp_path), about.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "ft_core.cli.launch", "--nproc-per-node=2", f"--job-dir={tmp_path}/job"]
    found = subprocess.run(
        [*command, str(tmp_path / "train.py")], env=about, capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 1
    assert "no worker can be started here: libcudnn.so.9: cannot open" in found.stderr
    assert found.stderr.endswith(
        "all nodes have failed as they were starting, of the errors above; none is left\n"
    )


def test_an_agent_that_fails_as_it_starts_is_started_again_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """A file may not be as large as the memory that it shares with workers. Then with stand-ins: one
    that is killed is none of those that fail."""
    job(tmp_path / "job", free_port())
    launcher, limits = Launcher(tmp_path / "job"), resource.getrlimit(resource.RLIMIT_FSIZE)
    launcher.standalone = True
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
        launcher.agent("node", 0, "")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert launcher.wait() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        launcher.stop()
    assert console().flush(20)
    said = capfd.readouterr().err
    assert "a file may have 262144 bytes here. Raise the limit: ulimit -f" in said
    assert said.endswith("all nodes have failed as they were starting, of the errors above; none is left\n")

    ends = iter(["fail", "kill", "fail", "fail", "fail"])
    stand_in = "import os, sys; [os.unlink(path) for path in sys.argv[1:]]; os.kill(os.getpid(), 9)"

    def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
        note = [f"{arguments[-1]}/{FAILED_NOTE}"] if next(ends) == "kill" else []
        return subprocess.Popen([sys.executable, "-c", stand_in, *note], start_new_session=True)

    launcher.respawn = True
    monkeypatch.setattr(launcher, "_start", start)
    launcher.agent("node", 0, "")
    assert launcher.wait() == 1 and not list(ends)
    assert console().flush(20)
    assert capfd.readouterr().err.count("none is left") == 1

    monkeypatch.setattr(
        launcher, "_start", lambda *_: subprocess.Popen([sys.executable, "-c", "1/0"], start_new_session=True)
    )
    launcher.agent("node", 0, "")
    assert launcher.wait() == 1, "it had not even begun"
    assert console().flush(20)
    assert "ZeroDivisionError" in (said := capfd.readouterr().err) and said.count("none is left") == 1


def test_an_agent_that_ends_while_it_is_looked_whether_any_is_left_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It has not been counted as one that has ended yet."""

    class Ends:
        pid, returncode = 2**22 + 1, None  # none that Linux gives

        def __init__(self, codes: list[int | None]) -> None:
            self.codes = codes

        def poll(self) -> int | None:
            self.returncode = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
            return self.returncode

    agents = [Ends([None, -9]), Ends([0])]
    launcher = Launcher(tmp_path)
    launcher.respawn = True
    monkeypatch.setattr(launcher, "_start", lambda *_: agents.pop(0))
    launcher.agent("node", 0, "")
    assert launcher.wait() == 0 and not agents


@pytest.mark.parametrize("needed", [1, 2])
def test_a_node_that_another_stands_in_for_is_replaced_later(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that starts takes the cores from those who recover."""
    began: list[float] = []

    def start(*_: str) -> subprocess.Popen[bytes]:
        began.append(time.monotonic())
        seconds = 0 if len(began) == 2 else 5
        return subprocess.Popen(["sleep", str(seconds)], start_new_session=True)

    launcher = Launcher(tmp_path)
    launcher.respawn, launcher.needed = True, needed
    monkeypatch.setattr(launcher, "_start", start)
    monkeypatch.setattr("ft_core.cli.launcher._STANDS_IN", 60.0)
    try:
        for rank in range(2):
            launcher.agent(f"node{rank}", rank, "")
        launcher._agents[1].wait()
        launcher._agents[1].returncode = -9
        threading.Timer(3.0, launcher.terminate).start()
        launcher.patience = 0.0
        launcher.wait()
        assert len(began) == (3 if needed == 2 else 2)
    finally:
        launcher.stop()


def test_a_hello_of_another_version_is_refused_and_costs_no_controller(tmp_path: Path):
    """Whichever field of a hello it has not."""

    async def test() -> None:
        async with Fleet(tmp_path / "job", nodes=1, replicas=0) as fleet:
            await fleet.event("resumed")
            agent = RealAgent(fleet.settings, fleet.job_dir, "spare", -1)
            agent.serve()
            await fleet.event("joined", 2)
            await agent.end()
            await fleet.event("spare_lost")
            whole = msgspec.to_builtins(HELLO)
            less = [{key: value for key, value in whole.items() if key != name} for name in whole]
            held = whole["holdings"]
            less += [
                {**whole, "holdings": {key: value for key, value in held.items() if key != name}}
                for name in held
                if name != "type"
            ]
            for hello in less:
                channel = await AsyncChannel.connect(fleet.settings.controller, fleet.secret, FROM_CONTROLLER)
                channel.post(hello)
                with pytest.raises(ConnectionError):
                    await channel.recv()
            await fleet.until(lambda: len(fleet.events("refused")) == min(len(less), refusals.TOLD))
            assert "missing required field `node`" in fleet.events("refused")[1]["reason"]
            assert not fleet.events("detected") and len(fleet.events("joined")) == 2

    asyncio.run(test())


def test_ftctl_costs_no_controller(tmp_path: Path):
    async def test() -> None:
        async with Fleet(tmp_path / "job") as fleet:
            await fleet.event("resumed")
            for nonsense in ({"type": "DescribeRole", "role": "x"}, {"type": "DescribeRole"}, {}):
                channel = await connected(fleet)
                channel.post(nonsense)
                with pytest.raises(ConnectionError):
                    await channel.recv()
            assert len(fleet.events("refused")) == 3
            channel = await connected(fleet)
            channel.post(Inject(role=7))
            assert await channel.recv() == Denied("no such role or node: 7")
            channel.post(AskStatus())
            status = await channel.recv()
            assert isinstance(status, JobStatus) and status.phase == "running"
            channel.close()

    async def connected(fleet: Fleet) -> AsyncChannel[ToCtl]:
        channel = await AsyncChannel.connect(fleet.settings.controller, fleet.secret, TO_CTL)
        channel.post(CtlHello(""))
        return channel

    asyncio.run(test())


def test_a_task_and_a_callback_that_fail_are_heard_of():
    async def fails() -> None:
        raise OSError("in a task")

    def fails_too() -> None:
        raise OSError("in a callback")

    async def test() -> list[str]:
        found: list[str] = []
        tasks = Tasks(lambda error: found.append(str(error)))
        tasks.spawn(fails())
        asyncio.get_running_loop().call_soon(fails_too)
        for _ in range(10):
            await asyncio.sleep(0)
        waiting = tasks.spawn(asyncio.sleep(60))
        tasks.cancel()
        await asyncio.wait([waiting])
        return found

    assert sorted(asyncio.run(test())) == ["in a callback", "in a task"]


def test_a_controller_whose_job_directory_is_gone_says_so_without_a_traceback(tmp_path: Path):
    command = [sys.executable, "-m", "ft_core.control", "--failed-before", "0"]
    done = subprocess.run(
        [*command, "--job-dir", str(tmp_path / "gone")], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ftrun: ") and "Traceback" not in done.stderr, done.stderr


def test_a_controller_that_cannot_be_understood_ends_the_agent(tmp_path: Path) -> None:
    """It connected again for ever, twenty times a second, and its node was there and of no use."""

    async def test(fleet: Fleet) -> None:
        greeted = []

        async def serve(connection: Connection) -> None:
            channel = await AsyncChannel.accept(connection, read_secret(fleet.job_dir), FROM_CLIENT)
            greeted.append(await channel.recv())
            channel.post(Welcome([1]))  # for a worker
            with contextlib.suppress(ConnectionError):
                await channel.recv()
            connection.close()

        server = asyncio.create_task(
            acceptor.serve(sock := listen("127.0.0.1"), fleet.secret, "a test", serve)
        )
        port = sock.getsockname()[1]
        settings = dataclasses.replace(fleet.settings, controller=f"127.0.0.1:{port}")
        agent = RealAgent(settings, fleet.job_dir, "agent", 0)
        agent.serve()
        with pytest.raises(ProtocolError, match="Welcome"):
            await asyncio.wait_for(agent._done, 60)
        assert len(greeted) == 3
        server.cancel()

    play(test, tmp_path / "job", nodes=1, replicas=0)


def test_a_controller_whose_port_is_taken_for_datagrams_says_so(tmp_path: Path) -> None:
    with reserve("127.0.0.1") as free, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        port = free.getsockname()[1]  # by TCP nobody else gets it
        taken.bind(("127.0.0.1", port))
        job(tmp_path / "job", port)
        command = [sys.executable, "-m", "ft_core.control", "--job-dir", str(tmp_path / "job")]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(
        r"ftrun: the controller cannot listen at 127.0.0.1:\d+: .*for datagrams \(UDP\)", done.stderr
    )

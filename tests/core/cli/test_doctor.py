"""`ftctl doctor` finds what keeps a recovery from working: on a machine, and in a job that was hurt."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from core.control.test_controller_machine import ControlPlane, sent
from harness import ROOT, Job, Layout, environment
from planned import FRAMEWORKS as PLANNERS
from waiting import wait_for_value

from ft_core.cli import ctl
from ft_core.cli.doctor import case as doctor_case
from ft_core.cli.doctor import job as doctor_job
from ft_core.cli.doctor import machine, network, software
from ft_core.cli.doctor.case import Case
from ft_core.control.events import Received
from ft_core.node.admission import limits, nccl
from ft_core.node.admission.findings import Finding, Level
from ft_core.protocol.messages import AskStatus, JobStatus, Unprotected
from ft_core.settings import Command, Settings
from ft_deepspeed.doctor import FRAMEWORK as DEEPSPEED
from ft_megatron.doctor import FRAMEWORK as MEGATRON

FRAMEWORKS = (DEEPSPEED, MEGATRON)
SETTINGS = Settings(nnodes=2, nproc_per_node=2, command=Command("train.py"), controller="127.0.0.1:1")


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def named(findings: Iterator[Finding] | list[Finding], name: str) -> Finding:
    return only(f for f in findings if f.name == name)


def run(*words: str, prefix: str = "") -> tuple[int, list[Finding]]:
    """`ftctl doctor --json` in a process of its own."""
    command = f'{prefix} exec {sys.executable} -m ft_core.cli.ctl doctor --json "$@"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", *words],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    return done.returncode, [Finding(**f) for f in json.loads(done.stdout)]


def test_this_machine() -> None:
    """With a limit that is too low for it: the one failure, and the exit code with it."""
    code, found = run(prefix="ulimit -n 512;")
    assert code == 1
    assert named(found, "open files").level == "fail" and "512" in named(found, "open files").found
    assert named(found, "version of torch").level == "ok"
    assert not [f for f in found if f.name in ("launcher", "controller", "job directory")]
    assert all(f.advice for f in found if f.level != "ok")


def test_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*torchrun, "-m", "ft_core.cli.ctl", "doctor"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "FAIL  launcher: this process was started by torchrun" in done.stdout
    assert done.returncode == 1


def test_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()

    def level(name: str, *words: str) -> Level:
        ctl.main(["doctor", "--json", *map(str, words)])
        return Level(named([Finding(**f) for f in json.loads(capsys.readouterr().out)], name).level)

    assert level("launcher", "torchrun", "--nnodes", "2", script) is Level.FAIL
    assert level("launcher", "python", "-m", "torch.distributed.run", script) is Level.FAIL
    assert level("launcher", "ftrun", "--standalone", script, "--ft") is Level.OK
    assert level("command line", "ftrun", "--nnodes=2", script) is Level.FAIL  # no --node-rank


def test_the_scripts_arguments() -> None:
    def levels(*arguments: str) -> dict[str, Level]:
        found = software.script(Case(frameworks=FRAMEWORKS, arguments=arguments))
        return {f.name: f.level for f in found}

    assert levels("--ft", "--lr=1") == {"protection": "ok"}
    assert levels("--deepspeed_config=not-here.json") == {"protection": "warn"}, "nobody knows what is in it"
    assert levels("--lr", "1") == {"protection": "warn"}
    assert levels("--ft", "--inprocess-restart") == {"other fault tolerance": "fail", "protection": "ok"}
    assert not list(software.script(Case(arguments=["--lr"])))  # no framework says what to look for


@pytest.mark.parametrize(
    ("config", "level", "found"),
    [
        ({"fault_tolerance": {"replicas": 1}}, "ok", "{} has a fault_tolerance section"),
        ({}, "warn", "the DeepSpeed configuration {} has no fault_tolerance section"),
        (
            {"fault_tolerance": {"enabled": False}},
            "warn",
            'the DeepSpeed configuration {} has "enabled": false in fault_tolerance',
        ),
        (
            {"fault-tolerance": {}},
            "warn",
            '--deepspeed_config {}: fault-tolerance: unknown section; did you mean "fault_tolerance"?',
        ),
    ],
)
def test_what_the_deepspeed_configuration_says(
    config: object, level: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    arguments = ["--deepspeed_config", str(path)]
    finding = only(software.script(Case(frameworks=FRAMEWORKS, arguments=arguments)))
    assert (finding.level, finding.found) == (level, found.format(path)) and "--ft" not in finding.advice


def test_a_running_job_that_is_not_protected() -> None:
    """The job itself knows best; copies of nothing are not missed."""
    plane = ControlPlane(nodes=2)
    plane["node0"].say(Unprotected(0, "it wants none", so_far=False))
    [answer] = sent(plane.happens(Received(next(plane.peers), AskStatus())), JobStatus).values()
    about = {"frameworks": FRAMEWORKS, "arguments": ["--ft"], "settings": SETTINGS, "status": answer}
    case = Case(**about, line=lambda: pytest.fail("it is not asked"))  # type: ignore[arg-type]
    finding = only(software.script(case))
    assert (finding.level, finding.found) == (Level.FAIL, "it wants none")
    assert not list(doctor_job.replicas(case))


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("python", "3.10.2", "fail"),
        ("torch", "2.6.0+cu124", "fail"),
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.99.0", "warn"),
        ("megatron-core", "0.15.3", "fail"),
        ("megatron-core", "0.19.2", "ok"),
        ("deepspeed", "0.18.8", "warn"),
        ("nccl", "2.25.1", "fail"),
        ("nccl", "2.31.2", "warn"),
        ("nccl", "2.28.2", "ok"),
        ("nccl", "2.28.3", "fail"),
        ("nccl", "2.28.8", "fail"),
        ("nccl", "2.28.9", "ok"),
    ],
)
def test_versions(name: str, version: str, level: str) -> None:
    case = Case(versions={name: version}, frameworks=FRAMEWORKS)
    assert only(iter([*software.versions(case), *nccl.nccl_version(case)])).level == level


@pytest.mark.parametrize(
    ("environment", "gpus", "levels"),
    [
        ({}, 0, []),
        ({}, 8, ["ok"]),  # torch's default would end the survivors: agents set another
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, 8, ["ok"]),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, 0, ["fail"]),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, 0, ["fail"]),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, 8, ["warn"]),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, 0, ["warn"]),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, 0, []),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, 0, ["warn"]),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "TORCH_NCCL_ENABLE_MONITORING": "0"}, 0, []),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"}, 0, []),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, 0, ["fail"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, 0, ["fail"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, 0, []),
        ({"TORCH_NCCL_ENABLE_MONITORING": "1"}, 0, []),
        ({"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "true"}, 0, ["fail"]),
    ],
)
def test_nccl(environment: dict[str, str], gpus: int, levels: list[str]) -> None:
    case = Case(environment=environment, gpus=gpus)
    found = [*nccl.nccl_errors(case), *nccl.nccl_threads(case), *software.nccl_waits(case)]
    assert [f.level for f in found] == levels


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("NCCL_SOCKET_IFNAME", "ib", "ok"),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=ib", "fail"),
        ("NCCL_SOCKET_IFNAME", "^ib", "ok"),
        ("NCCL_SOCKET_IFNAME", "^ib,eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "bond0", "fail"),
        ("GLOO_SOCKET_IFNAME", "ib0", "ok"),
        ("GLOO_SOCKET_IFNAME", "ib", "fail"),
    ],
)
def test_interfaces(variable: str, value: str, level: str, tmp_path: Path) -> None:
    for name in ("lo", "eth0", "ib0"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    case = Case(environment={variable: value}, root=tmp_path)
    assert only(nccl.interfaces(case)).level == level


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    assert not list(software.slurm(Case()))
    assert only(software.slurm(Case(environment=here))).level == "ok"
    kills = {**here, "SLURM_KILL_BAD_EXIT": "1"}
    assert only(software.slurm(Case(environment=kills))).level == "fail"
    assert named(software.slurm(Case(environment=here, settings=SETTINGS)), "slurm spares").level == "warn"
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'KillOnBadExit           = 1'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert only(software.slurm(Case(environment=here))).level == "fail"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A container's /proc and /sys: 64 GB, of which the cgroup allows 8 and uses 3, 1 of it page cache."""
    files = {
        "proc/meminfo": f"MemTotal:       {64 << 20} kB\nMemAvailable:   {60 << 20} kB\n",
        "proc/self/cgroup": "0::/pod\n",
        "proc/self/oom_score_adj": "0\n",
        "sys/fs/cgroup/pod/memory.max": "max\n",
        "sys/fs/cgroup/pod/memory.oom.group": "0\n",
        "sys/fs/cgroup/memory.max": f"{8 << 30}\n",
        "sys/fs/cgroup/memory.current": f"{3 << 30}\n",
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {1 << 30}\n",
        "sys/fs/cgroup/pod/pids.max": "1000000\n",
        "sys/fs/cgroup/pod/pids.current": "10\n",
    }
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def test_memory_of_a_container(root: Path) -> None:
    assert "6.4 of 8.6 GB" in only(machine.memory(Case(root=root))).found
    model = "--num-layers {} --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 1024"
    for layers, level in ((2, "ok"), (10, "warn"), (12, "fail")):
        arguments = model.format(layers).split()
        found = only(
            machine.memory(Case(settings=SETTINGS, arguments=arguments, planners=PLANNERS, root=root))
        )
        assert found.level == level, found
    (root / "proc/self/cgroup").write_text("4:memory:/gone\n0::/\n")  # cgroup v1; the path is the host's
    v1 = root / "sys/fs/cgroup/memory"
    v1.mkdir()
    (v1 / "memory.limit_in_bytes").write_text(f"{4 << 30}\n")
    (v1 / "memory.usage_in_bytes").write_text(f"{3 << 30}\n")
    found = only(machine.memory(Case(root=root)))
    assert found.level == "warn" and "1.1 of 4.3 GB" in found.found


def test_out_of_memory(root: Path) -> None:
    assert not list(machine.out_of_memory(Case(root=root)))
    (root / "proc/self/oom_score_adj").write_text("1000\n")
    assert only(machine.out_of_memory(Case(root=root))).level == "warn"
    (root / "sys/fs/cgroup/pod/memory.oom.group").write_text("1\n")
    assert "oom.group is 1" in only(machine.out_of_memory(Case(root=root))).found


def test_limits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def level(name: str) -> Level:
        return named(limits.limits(Case(settings=SETTINGS, root=root)), name).level

    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert level("threads") == level("open files") == "ok"
    (root / "sys/fs/cgroup/pod/pids.max").write_text("600\n")
    assert level("threads") == "warn"
    (root / "sys/fs/cgroup/pod/pids.max").write_text("60\n")
    assert level("threads") == "fail"
    (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert level("locked memory") == "fail" and level("open files") == "ok"


def test_processors(root: Path) -> None:
    (root / "sys/fs/cgroup/pod/cpu.max").write_text("50000 100000\n")
    found = only(machine.processors(Case(root=root)))
    assert found.level == "warn" and found.found.startswith("0.5 cores")


def test_shared_memory() -> None:
    assert [f.name for f in limits.shared_memory(Case())] == ["shared memory"]  # it can be mapped here


def test_controllers_address() -> None:
    several = replace(SETTINGS, controller="")

    def level(controller: str) -> Level:
        case = Case(settings=several, controller=controller)
        return named(network.ports(case), "controller's address").level

    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", low - 1)):  # taken by something else
        case = Case(controller=f"127.0.0.1:{low - 1}")
        assert named(network.ports(case), "controller's address").level == "fail"
    assert level("nowhere.invalid:29400") == "fail"
    assert level("no port") == "fail"
    assert level("localhost:29400") == "fail"  # of several nodes, none but this one reaches it
    assert level(f"0.0.0.0:{low + 1}") == "warn"


def test_directories(tmp_path: Path) -> None:
    def level(name: str, **about: object) -> Level:
        return named(network.directories(Case(**about)), name).level  # type: ignore[arg-type]

    job_dir = tmp_path / "job"
    assert level("job directory", job_dir=job_dir) == "ok"
    job_dir.mkdir()
    (job_dir / "secret").touch(0o644)
    assert level("job directory", job_dir=job_dir) == "warn"
    (job_dir / "events.jsonl").touch()
    assert level("job directory", job_dir=job_dir, launcher="ftrun") == "fail"
    assert level("job directory", job_dir=job_dir / "secret" / "below") == "fail"
    for directory, standalone, wanted in (("/dev/shm", True, "fail"), (str(tmp_path), False, "fail")):
        settings = replace(SETTINGS, durable_dir=directory, durable_interval=5)
        assert level("durable checkpoints", settings=settings, standalone=standalone) == wanted
    assert level("durable checkpoints", settings=settings, standalone=True) == "ok"


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_a_running_job(tmp_path: Path) -> None:
    """Whole, then without its spare, then waiting, then without its controller."""

    def findings() -> dict[str, Finding]:
        case = doctor_case.case(job.job_dir, "", [])
        return {f.name: f for check in doctor_job.CHECKS for f in check(case)}

    def becomes(controller: str, spares: str, replicas: str, agents: str) -> dict[str, Finding]:
        """Figures are as of the last heartbeats: some time later they must be these."""
        deadline = time.monotonic() + 60
        while True:
            found = findings()
            if [f.level for f in found.values()] == [controller, spares, replicas, agents]:
                return found
            assert time.monotonic() < deadline, found

    with Job(tmp_path / "job", Layout(1, 1, 2), 100_000) as job:
        job.wait_for_step(3)
        becomes("ok", "ok", "ok", "ok")
        os.kill(job.status()["spares"][0]["agent_pid"], signal.SIGKILL)
        becomes("ok", "warn", "ok", "ok")
        os.kill(job.pids(1)[0], signal.SIGKILL)
        job.wait_for("waiting")
        found = becomes("fail", "warn", "fail", "ok")
        assert "waiting" in found["controller"].found and "role 1" in found["replicas"].found
        job.process.send_signal(signal.SIGSTOP)  # it would start the controller again
        os.kill(job.status()["controller_pid"], signal.SIGKILL)
        wait_for_value(lambda: "no answer" in findings()["controller"].found, True)
        assert ctl.main(["--job-dir", str(job.job_dir), "doctor"]) == 1


def test_a_secret_that_nodes_share(tmp_path: Path) -> None:
    def level(**facts: object) -> str:
        return only(network.secret(Case(settings=SETTINGS, **facts))).level  # type: ignore[arg-type]

    assert SETTINGS.nnodes > 1
    assert level(environment={"FT_JOB_SECRET": "x"}) == "ok"
    assert level() == "fail" and level(job_dir=tmp_path) == "warn"
    assert "FT_JOB_SECRET is not set" in only(network.secret(Case(settings=SETTINGS))).found
    (tmp_path / "secret").touch()
    assert level(job_dir=tmp_path) == "ok"
    assert not list(network.secret(Case(settings=SETTINGS, standalone=True)))
    assert not list(network.secret(Case()))

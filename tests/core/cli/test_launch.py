"""`ftrun` and `ftctl` reject what cannot work before anything is started, and name the flag."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import ROOT, environment, settings_of

from ft_core.cli import ctl, launch
from ft_core.cli.ask import WholeStatus, ask
from ft_core.cli.ask import status as status_of
from ft_core.cli.flags import parse
from ft_core.cli.launcher import Launcher
from ft_core.errors import ConfigError
from ft_core.process import inject
from ft_core.protocol.messages import Denied, Inject
from ft_core.protocol.sockets import listen
from ft_core.settings import SECRET_ENV, Settings, read_secret, write_secret


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(Launcher, "_start", refuse)
    monkeypatch.delenv(SECRET_ENV, raising=False)
    before = {number: signal.getsignal(number) for number in launch.ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    return str(path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--nnodes=0", "--nnodes '0'"),
        ("--nnodes=1:", "--nnodes ''"),
        ("--nnodes=4:1", "--nnodes 4:1"),
        ("--standalone --nnodes=1:4", "--ft-policy shrink"),
        ("--standalone --nnodes=2:4 --ft-policy=shrink --ft-pipeline-stages=3", "--ft-pipeline-stages 3"),
        ("--nproc-per-node=two", "--nproc-per-node 'two'"),
        ("--standalone --spares=-1", "--spares"),
        ("--spares=1", "--spares"),
        ("--standalone --ft-replicas=-1", "--ft-replicas"),
        ("--standalone --nnodes=2 --ft-replicas=2", "--ft-replicas 2"),
        ("--standalone --nnodes=2 --ft-replicas=3 --spares=1", "4 nodes or more; there are 2 and 1 spares"),
        ("--standalone --ft-durable-interval=10", "--ft-durable-dir"),
        ("--standalone --ft-durable-dir=there --ft-durable-interval=-1", "--ft-durable-interval"),
        ("--standalone --ft-heartbeat=0", "--ft-heartbeat"),
        ("--standalone --ft-hang-after=-1", "--ft-hang-after"),
        ("--standalone --ft-hang-limit=0", "--ft-hang-limit"),
        ("--standalone --ft-hang-after=700", "longer than --ft-hang-limit 600"),
        ("--standalone --ft-quiesce-timeout=-1", "--ft-quiesce-timeout"),
        ("--respawn", "--respawn"),
        ("--standalone --node-rank=1", "--node-rank"),
        ("--nnodes=2", "--node-rank"),
        ("--standalone --ft-inject=1@nowhere:3", "--ft-inject"),
        ("--standalone --tee=4", "--tee"),
        ("--standalone --redirects=0:4", "--redirects"),
        ("--nnodes=2 --node-rank=0 --rdzv-endpoint=host:port", "host:port"),
        ("--nnodes=2 --node-rank=0 --rdzv-endpoint=host:0", "host:0"),
    ],
)
def test_wrong_flags(flags: str, named: str, script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    job_dir = tmp_path / "job"
    assert launch.main([*flags.split(), f"--job-dir={job_dir}", script]) == 2
    error = capfd.readouterr().err
    assert error.startswith("ftrun: ") and named in error
    assert not job_dir.exists()


def test_a_directory_that_can_be_none_of_a_job(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    file = tmp_path / "file"
    file.touch()
    assert launch.main(["--standalone", f"--job-dir={file}", script]) == 2
    assert capfd.readouterr().err == f"ftrun: {file} cannot be the job directory: File exists\n"
    (tmp_path / "job" / "job.json").mkdir(parents=True)
    assert launch.main(["--standalone", f"--job-dir={tmp_path / 'job'}", script]) == 2
    assert "nothing can be written into the job directory" in capfd.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_others(closed: str, tmp_path: Path):
    """The files that are opened next would be taken for them."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('trained')\nprint('well', file=sys.stderr)\n")
    command = f"{sys.executable} -m ft_core.cli.launch --standalone --job-dir={tmp_path / 'job'} {script}"
    done = subprocess.run(
        ["bash", "-c", f"{command} {closed}"], env=environment(), timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("trained" in done.stdout) is (" >&-" not in f" {closed}".replace("2>&-", ""))


@pytest.mark.parametrize("flags", [[], ["--rdzv-endpoint=localhost:0"]])
def test_a_free_port_is_nobody_elses(
    flags: list[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not in the seconds until the controller listens, nor between one controller and the next."""
    for start in ("controller", "agent"):
        monkeypatch.setattr(Launcher, start, lambda *_: None)
    command = ["--standalone", *flags, f"--job-dir={tmp_path / 'job'}", script]
    launcher = launch._launch(parse(command, {}))
    host, _, port = Settings.read(tmp_path / "job").controller.rpartition(":")
    assert int(port) and (tmp_path / "job" / "controller").read_text() == f"{host}:{port}\n"
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        listen(host, int(port)).close()
    assert launcher.standalone


@pytest.mark.parametrize("flags", [["--ft-policy=panic"], ["--nonsense"], ["--spare=2"]])
def test_unknown_flags(flags: list[str], script: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        launch.main(["--standalone", *flags, script])
    assert stop.value.code == 2
    assert flags[0].split("=")[0] in capfd.readouterr().err


def test_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert launch.main(["--standalone"]) == 2
    assert "no script given" in capfd.readouterr().err
    assert launch.main(["--standalone", str(tmp_path / "missing.py")]) == 2
    assert "there is no script" in capfd.readouterr().err


def test_flags_behind_the_script_are_the_scripts(script: str):
    settings = settings_of("--standalone", "--nnodes=2", script, "--nnodes=7", "-x", "--spares", "9")
    assert settings.nnodes == 2 and settings.spares == 0
    assert settings.command.arguments == ["--nnodes=7", "-x", "--spares", "9"]


@pytest.fixture
def framework(tmp_path: Path, script: str) -> Callable[..., list[str]]:
    """A script and its arguments, with a configuration that has the given section."""

    def command(**section: object) -> list[str]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 8, "fault_tolerance": section}))
        return [script, "--lr", "0.1", "--deepspeed_config", str(path)]

    return command


def test_the_scripts_own_configuration(framework: Callable[..., list[str]], tmp_path: Path):
    durable = {"interval": 7, "dir": str(tmp_path)}
    section = {"replicas": 2, "spares": 1, "policy": "stop", "durable": durable}
    found = settings_of("--standalone", "--nnodes=3", *framework(**section))
    assert (found.replicas, found.spares, found.policy) == (2, 1, "stop")
    assert (found.durable_dir, found.durable_interval, found.given) == (str(tmp_path), 7, [])
    assert settings_of("--standalone", "--nnodes=2", *framework(replicas=2, spares=1)).replicas == 2
    same = settings_of("--standalone", "--nnodes=3", "--ft-replicas=2", *framework(**section))
    assert same == dataclasses.replace(found, given=["replicas"], controller=same.controller)
    more = settings_of("--standalone", "--ft-policy=stop", "--spares=0", *framework(replicas=1))
    assert (more.policy, more.replicas, more.given) == ("stop", 1, ["policy", "spares"])
    assert settings_of("--standalone", *framework(enabled=False, replicas=5)).replicas == 1


def test_without_standalone_spares_are_started_one_by_one(framework: Callable[..., list[str]]):
    assert settings_of("--nnodes=2", "--node-rank=1", *framework(spares=1)).spares == 0


def test_a_program_that_is_no_script_is_not_read(framework: Callable[..., list[str]]):
    assert settings_of("--standalone", "--no-python", *framework(replicas=-1)).replicas == 1


def test_spares_of_the_scripts_own_configuration_are_started(
    framework: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started = []

    def start(_: object, module: str, *about: str) -> object:
        started.append((module, *about))
        return object()

    monkeypatch.setattr(Launcher, "_start", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Launcher, "wait", lambda _: 0)
    monkeypatch.setattr(Launcher, "stop", lambda _: None)
    monkeypatch.setattr("ft_core.cli.launch.signal.signal", lambda *_: None)  # of this process, for good
    flags = ["--standalone", "--nnodes=2", f"--job-dir={tmp_path / 'job'}"]
    assert launch.main([*flags, *framework(spares=1)]) == 0
    nodes = [about[1] for module, *about in started if module == "ft_core.node"]
    assert nodes == ["node0", "node1", "node2"]
    assert Settings.read(tmp_path / "job").spares == 1


@pytest.mark.parametrize(
    ("flags", "section", "named"),
    [
        ("", {"replica": 1}, ["--deepspeed_config", "ds.json: fault_tolerance.replica: unknown key"]),
        ("", {"replicas": "1"}, ["fault_tolerance.replicas must be a whole number"]),
        (
            "",
            {"durable": {"interval": 5}},
            ["fault_tolerance.durable.interval", "fault_tolerance.durable.dir"],
        ),
        ("", {"replicas": 2}, ["replicas (the configuration in the script's arguments) 2 needs 3 nodes"]),
        (
            "--ft-replicas=1",
            {"replicas": 0},
            ["--ft-replicas 1 of ftrun contradicts", "which says replicas 0"],
        ),
        ("--spares=2", {"spares": 1}, ["--spares 2 of ftrun contradicts", "which says spares 1"]),
        ("--ft-policy=wait", {"policy": "stop"}, ["--ft-policy wait of ftrun", "policy stop"]),
        (
            "--ft-durable-dir=/a --ft-durable-interval=5",
            {"durable": {"interval": 5, "dir": "/b"}},
            ["--ft-durable-dir /a of ftrun contradicts", "durable_dir /b"],
        ),
        (
            "--ft-durable-dir=/a --ft-durable-interval=5",
            {"durable": {"interval": 6, "dir": "/a"}},
            ["--ft-durable-interval 5 of ftrun contradicts", "durable_interval 6"],
        ),
    ],
)
def test_wrong_configurations(
    flags: str,
    section: dict,
    named: list[str],
    framework: Callable[..., list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    job_dir = tmp_path / "job"
    command = ["--standalone", "--nnodes=2", *flags.split(), f"--job-dir={job_dir}", *framework(**section)]
    assert launch.main(command) == 2
    error = capfd.readouterr().err
    assert error.startswith("ftrun: ") and all(text in error for text in named)
    assert not job_dir.exists()


def test_the_directory_of_an_earlier_job(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "events.jsonl").touch()
    assert launch.main(["--standalone", f"--job-dir={tmp_path}", script]) == 2
    assert "is the directory of an earlier job" in capfd.readouterr().err


def test_the_directory_of_a_job_that_another_is_about_to_begin(script: str, tmp_path: Path):
    """It would overwrite what the first one's processes read."""
    first, second = Launcher(tmp_path), Launcher(tmp_path)
    first.claim()
    with pytest.raises(ConfigError, match="is the directory of a job that runs"):
        second.claim()
    del first
    second.claim()


@pytest.mark.parametrize("where", ["--rdzv-endpoint=127.0.0.1:9", "--ft-leadership=etcd://127.0.0.1:9/x"])
def test_who_does_not_begin_a_job_overwrites_no_other(
    where: str,
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """Its settings are read by whoever joins that job by its directory."""
    for start in ("controller", "agent"):
        monkeypatch.setattr(Launcher, start, lambda *_, **__: None)
    job_dir = tmp_path / "job"
    flags = ["--nnodes=2", f"--job-dir={job_dir}"]
    joins = ["--nnodes=2", f"--join={where.partition('=')[2]}", f"--job-dir={job_dir}"]

    def files() -> list[str]:
        return [(job_dir / name).read_text() for name in ("job.json", "controller")]

    launch._launch(parse([*flags, where, "--node-rank=1", script, "--lr", "1"], {}))
    before = files()
    launch._launch(parse([*flags, where, "--node-rank=2", "--tee=0", script, "--lr", "1"], {}))
    launch._join(parse([*joins, "--ft-metrics-port=9000", script, "--lr", "1"], {}))
    launch._launch(parse([*flags, where, "--node-rank=1", script, "--lr", "2"], {}))
    launch._join(parse([*joins, script, "--lr", "2"], {}))
    assert files() == before, "what becomes of it is for the controller to say"
    for words in ([*flags, where, "--node-rank=1"], joins):
        assert launch.main([*words, "--ft-replicas=0", script, "--lr", "1"]) == 2
        error = capfd.readouterr().err
        assert "is the directory of another job: replicas is 0 here, and 1 in" in error
        assert "give a new one" in error
    assert files() == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_signals_that_end_it_leave_nothing(number: signal.Signals, tmp_path: Path):
    """Also two of them, one right after the other."""
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(1000)")
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", "--spares=0"]
    command += [f"--job-dir={tmp_path / 'job'}", str(script)]
    about = {**environment(), "TMPDIR": str(tmp_path / "tmp")}

    def not_ignored() -> None:  # by who runs the tests
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

    with subprocess.Popen(command, env=about, cwd=ROOT, preexec_fn=not_ignored) as job:
        while not (tmp_path / "job" / "events.jsonl").exists():
            assert job.poll() is None
            time.sleep(0.02)
        for _ in range(3):
            job.send_signal(number)
            time.sleep(0.05)
        job.wait(30)
    assert job.returncode == 128 + number
    assert not list((tmp_path / "tmp").glob("ft-agent-*"))


def test_join(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert launch.main(["--join=127.0.0.1:1"]) == 2
    assert "--join needs the job's --job-dir" in capfd.readouterr().err
    assert launch.main(["--join=127.0.0.1:1", f"--job-dir={tmp_path}"]) == 2
    assert "is not a job's settings" in capfd.readouterr().err
    assert launch.main(["--join=127.0.0.1:1", f"--job-dir={tmp_path / 'elsewhere'}"]) == 2
    assert "the job's command line, and set FT_JOB_SECRET" in capfd.readouterr().err
    _job(tmp_path, script)
    assert launch.main(["--join=127.0.0.1:1", f"--job-dir={tmp_path}"]) == 2
    assert f"the job in {tmp_path} is at" in capfd.readouterr().err


def _job(job_dir: Path, script: str) -> Settings:
    settings = settings_of("--standalone", script, "--lr", "0.1")
    settings.write(job_dir)
    write_secret(job_dir)
    return settings


def test_settings_and_secret_files(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = _job(tmp_path, script)
    assert Settings.read(tmp_path) == settings
    assert settings.command.arguments == ["--lr", "0.1"]
    path = tmp_path / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(tmp_path) == path.read_bytes() and len(path.read_bytes()) == 64
    write_secret(tmp_path)  # a node that joins finds the job's secret there
    assert read_secret(tmp_path) == path.read_bytes()
    assert read_secret(tmp_path).decode() not in (tmp_path / "job.json").read_text()
    monkeypatch.setenv(SECRET_ENV, "told by the scheduler")
    assert read_secret(tmp_path) == b"told by the scheduler"
    assert read_secret(None) == b"told by the scheduler"


def test_no_secret(tmp_path: Path):
    for job_dir in (None, tmp_path):
        with pytest.raises(ConfigError, match=f"no job secret .* set {SECRET_ENV}"):
            read_secret(job_dir)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nnodes": 1}', '{"command": {"target": "x"}, "new": 1}'])
def test_settings_that_are_none(text: str, tmp_path: Path):
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a job's settings"):
        Settings.read(tmp_path)


def test_injections():
    assert inject.parse("") == []
    assert inject.parse("3@forward:5,0@h2h:7:worker,1@forward:2:memory") == [
        inject.Injection(3, "forward", 5, ""),
        inject.Injection(0, "h2h", 7, "worker"),
        inject.Injection(1, "forward", 2, "memory"),
    ]


@pytest.mark.parametrize(
    "part",
    [
        "x",
        "1@forward",
        "@forward:1",
        "1@forward:x",
        "1@sleep:1",
        "1@forward:1:node",
        "1@forward:1:worker:2",
        "1@h2h:1:error",
        "1@2@3:4",
    ],
)
def test_wrong_injections(part: str):
    with pytest.raises(ConfigError) as wrong:
        inject.parse(f"0@backward:1,{part}")
    assert f"cannot read {part!r}" in str(wrong.value) and "evaluate" in str(wrong.value)


def test_ctl_without_a_job(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert ctl.main(["--job-dir", str(tmp_path), "status"]) == 2
    assert "is not a job's settings" in capfd.readouterr().err
    _job(tmp_path, script)
    assert ctl.main(["--job-dir", str(tmp_path), "status"]) == 2
    assert "refused" in capfd.readouterr().err
    (tmp_path / "secret").unlink()
    assert ctl.main(["--job-dir", str(tmp_path), "kill", "--role", "0"]) == 2
    assert "no job secret" in capfd.readouterr().err


@pytest.mark.parametrize(
    "command", [[], ["kill"], ["kill", "--role", "x"], ["kill", "--role", "0", "--node", "n"]]
)
def test_ctl_wrong_calls(command: list[str], capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        ctl.main(command)
    assert stop.value.code == 2
    assert "usage: ftctl" in capfd.readouterr().err


def test_ctl_asks_a_job_that_says_no(tmp_path: Path):
    """A job of one node that waits: what is not there cannot be killed."""
    script = tmp_path / "wait.py"
    script.write_text("import time\ntime.sleep(60)\n")
    command = [
        sys.executable,
        "-m",
        "ft_core.cli.launch",
        "--standalone",
        f"--job-dir={tmp_path / 'job'}",
        str(script),
    ]
    with subprocess.Popen(command, env=environment(), cwd=ROOT) as job:
        try:
            status = _status(tmp_path / "job", job)
            assert [row.role for row in status.roles] == [0] and status.spares == []
            for victim, name in ((Inject(role=7), "7"), (Inject(node="nowhere"), "nowhere")):
                assert ask(victim, tmp_path / "job") == Denied(f"no such role or node: {name}")
            assert ctl.main(["--job-dir", str(tmp_path / "job"), "kill", "--role", "7"]) == 1
        finally:
            job.terminate()
            job.wait(60)


def test_a_program_of_torchs_runs_as_under_torchrun(tmp_path: Path):
    """Executed, it is beyond our reach, and makes a store of its own at the port that it is given."""
    script, sums = tmp_path / "sum.py", tmp_path / "sums"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        f"open({str(sums)!r}, 'a').write(f'{{total.item()}} ')\n"
        "dist.destroy_process_group()\n"  # or torch's threads may abort the interpreter at its end
    )
    command = [
        sys.executable,
        "-m",
        "ft_core.cli.launch",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    command += [f"--job-dir={tmp_path / 'job'}", sys.executable, str(script)]
    few = ["bash", "-c", 'ulimit -Sn 20; exec "$@"', "bash"]  # the hard limit is what counts
    done = subprocess.run(
        [*few, *command], env=environment(), cwd=ROOT, timeout=110, capture_output=True, text=True
    )
    assert (done.returncode, sums.read_text()) == (0, "2.0 2.0 "), done.stderr


def test_a_long_path_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A socket in it would have none; and /tmp may be of no use."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", f"--job-dir={tmp_path / 'job'}"]
    done = subprocess.run(
        [*command, str(script)],
        env=environment() | {"TMPDIR": str(long)},
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert not list(long.iterdir())

    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(os, "access", lambda path, _: path != "/tmp")
    with pytest.raises(ConfigError, match=r"TMPDIR .* is too long for the sockets in it"):
        Launcher(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    Launcher(tmp_path)


def _status(job_dir: Path, job: subprocess.Popen[bytes]) -> WholeStatus:
    while job.poll() is None:
        events = job_dir / "events.jsonl"
        text = events.read_text() if events.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if '"decided"' in whole:
            assert all(json.loads(line)["event"] for line in whole.splitlines())
            return status_of(job_dir)
        time.sleep(0.05)
    raise AssertionError("the job ended")


def test_a_range_of_nodes_starts_with_the_smallest_number(script: str) -> None:
    flags = "--standalone --nnodes=2:4 --nproc-per-node=2 --ft-policy=shrink --ft-pipeline-stages=2".split()
    settings = settings_of(*flags, script)
    assert (settings.min_nodes, settings.nnodes, settings.world_size) == (2, 4, 8)
    assert settings.start.present == [0, 1, 4, 5]
    whole = settings_of("--standalone", "--nnodes=2:2", script)
    assert whole.min_nodes == 0 and whole.start.present == [0, 1]


@pytest.mark.parametrize("gpus", [1, -1])
def test_an_import_that_initializes_cuda_is_named(gpus: int, tmp_path: Path) -> None:
    """A stand-in, as there is no GPU: a module whose import makes torch say that forks cannot use CUDA.

    `gpus`: as NVML counts them. Where there is none torch says so too, and it does not matter.
    """
    (site := tmp_path / "site").mkdir()
    (site / "harmless.py").write_text("")
    (site / "greedy.py").write_text(
        "import os, torch\n"
        "torch.version.cuda = '12.8'\n"
        "torch.cuda._is_in_bad_fork = lambda: True\n"
        f"torch.cuda._device_count_nvml = lambda: {gpus}\n"
        f"torch._C._cuda_getDeviceCount = lambda: {max(gpus, 0)}\n"
        f"open({str(tmp_path / 'asked')!r}, 'w').write(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])\n"
    )
    (tmp_path / "job").mkdir()
    script = tmp_path / "job" / "train.py"
    script.write_text("import harmless\nfrom greedy import torch\nimport json\nprint('trained')\n")
    command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", f"--job-dir={tmp_path / 'dir'}"]
    path = f"{environment()['PYTHONPATH']}:{site}"
    about = {"env": {**environment(), "PYTHONPATH": path}, "cwd": ROOT, "timeout": 110}
    done = subprocess.run([*command, str(script)], **about, capture_output=True, text=True)
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    said = "ftrun: workers import greedy themselves, and start later for it: it initializes CUDA"
    assert done.stderr.count(said) == (gpus > 0), done.stderr
    assert (tmp_path / "asked").read_text() == "1"

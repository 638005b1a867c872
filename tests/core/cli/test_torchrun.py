"""`ftrun` in torchrun's place: its flags, its variables, and what schedulers and launchers set for it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import ROOT, environment
from ports import free_port
from torch.distributed.run import get_args_parser

from ft_core.cli import ctl, flags, launch, torchrun
from ft_core.cli.launcher import Launcher
from ft_core.errors import ConfigError
from ft_core.process.async_writer import console
from ft_core.process.sigterm import ENDED
from ft_core.settings import SECRET_ENV, Settings

TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
"""What Kubeflow's Trainer gives a pod."""
ELASTIC = {
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ID": "job",
    "PET_NNODES": "2:3",
    "PET_MAX_RESTARTS": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_CONF": "timeout=900",
}
"""What its training operator gives a pod of an elastic PyTorchJob."""
SRUN = {"SLURM_NODEID": "3", "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NNODES": "4"}
TOGETHER = "--nnodes 4 --nproc_per_node 8 --rdzv_id 7 --rdzv_backend c10d --rdzv_endpoint n1:29500"
"""As in torch's own example of a batch script."""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    return str(path)


@pytest.fixture
def read(script: str) -> Callable[..., tuple[Settings, int | None]]:
    """What is made of a command line without a script, and of an environment."""

    def made(words: str, environ: dict[str, str]) -> tuple[Settings, int | None]:
        args = flags.parse([*words.split(), script], environ)
        return flags.settings_of(args), args.node_rank

    return made


Read = Callable[[str, dict[str, str]], tuple[Settings, int | None]]


def test_a_pod_is_told_by_its_environment(read: Read) -> None:
    settings, rank = read("", TRAINJOB)
    assert (settings.nnodes, settings.nproc_per_node, rank) == (2, 4, 1)
    assert settings.controller == "job-node-0-0.job:29400"


def test_the_command_line_wins(read: Read) -> None:
    settings, rank = read("--nnodes 3 --node-rank 2 --nproc-per-node 1 --master_addr there", TRAINJOB)
    assert (settings.nnodes, settings.nproc_per_node, rank) == (3, 1, 2)
    assert settings.controller == "there:29400"
    assert read("--nnodes=2 --rdzv-endpoint=there:5", TRAINJOB)[0].controller == "there:5"
    elsewhere = {"PET_RDZV_ENDPOINT": "there:6", "PET_NODE_RANK": "1"}
    assert read("--nnodes=2 --master-addr=here --master-port=7", elsewhere)[0].controller == "here:7"
    assert read("--nnodes=2 --controller=here:8", elsewhere)[0].controller == "here:8"
    assert read("--nnodes=2 --ft-leadership=etcd://e:2379/job", elsewhere)[0].controller == ""


def test_a_job_of_one_pod_meets_nobody(read: Read) -> None:
    """Under any of the names that it may have for that."""
    for number in ("1", "1:1", ""):
        settings, _ = read("", {**TRAINJOB, "PET_NNODES": number, "PET_NODE_RANK": "0", **SRUN})
        assert (settings.nnodes, settings.min_nodes, settings.controller) == (1, 0, "127.0.0.1:0")


@pytest.mark.parametrize("environ", [TRAINJOB, ELASTIC, SRUN, {"GROUP_RANK": "1"}])
def test_standalone_is_alone_whatever_a_launcher_has_set(environ: dict[str, str], read: Read) -> None:
    settings, rank = read("--standalone", environ)
    assert (settings.nnodes, settings.min_nodes, settings.controller) == (1, 0, "127.0.0.1:0")
    assert rank is None
    assert read("", {**environ, "PET_STANDALONE": "1"}) == (settings, None)
    assert read("--standalone --nnodes=3", environ)[0].nnodes == 3


def test_a_range_of_nodes_asks_for_replica_groups(read: Read) -> None:
    with pytest.raises(ConfigError, match="2:3 starts without some replica groups: that takes --ft-policy"):
        read("", {**ELASTIC, "PET_NODE_RANK": "0"})
    settings, _ = read("--ft-policy=shrink", {**ELASTIC, "PET_NODE_RANK": "0"})
    assert (settings.min_nodes, settings.nnodes, settings.controller) == (2, 3, "job-worker-0:23456")
    assert settings.environment["TORCHELASTIC_RUN_ID"] == "job"


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (SRUN, 3),
        ({"GROUP_RANK": "2"}, 2),
        ({**SRUN, "GROUP_RANK": "2"}, 3),
        ({**SRUN, "PET_NODE_RANK": "1"}, 1),
        ({**SRUN, "PET_NODE_RANK": ""}, 3),
    ],
)
def test_a_nodes_number(environ: dict[str, str], rank: int, read: Read) -> None:
    settings, found = read(TOGETHER, environ)
    assert (settings.nnodes, settings.nproc_per_node, settings.controller) == (4, 8, "n1:29500")
    assert found == rank
    assert read(f"{TOGETHER} --node-rank 0", environ)[1] == 0


def test_a_job_of_its_own_on_each_node(read: Read) -> None:
    """As `srun --nodes 4 ftrun sweep.py` starts them."""
    assert read("--nproc-per-node 2", SRUN)[1] is None
    assert read("--nnodes 1", TRAINJOB)[1] is None
    assert read("--nnodes 1", TRAINJOB)[0].controller == "127.0.0.1:0"
    with pytest.raises(ConfigError, match="must know the controller's port"):
        read("--nnodes 1 --node-rank 1", {})


def test_without_a_number_it_is_said_where_one_may_come_from(read: Read) -> None:
    with pytest.raises(ConfigError, match="PET_NODE_RANK, SLURM_NODEID or GROUP_RANK"):
        read("--nnodes 2", {})


def test_without_a_number_nodes_meet_where_they_are_told_to(read: Read) -> None:
    """As with `--rdzv-backend c10d`, for which Kubeflow numbers no pods."""
    assert read(TOGETHER, {})[1] is None
    with pytest.raises(ConfigError, match="--nnodes above 1 needs --node-rank"):
        read("--nnodes 2 --ft-leadership etcd://e:2379/job", {})


def test_every_flag_of_torchrun_is_known() -> None:
    """Of the installed one, in each of its spellings."""
    known = {name for action in flags.parser()._actions for name in action.option_strings}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert theirs <= known


SAMPLES = {"nnodes": "3:3", "node_rank": "2", "master_port": "5", "max_restarts": "5", "redirects": "2"} | {
    "shutdown_timeout": "5",
    "start_method": "fork",
    "monitor_interval": "0.5",
}


def test_every_variable_of_torchrun_is_read() -> None:
    for action in get_args_parser()._actions:
        if not action.option_strings or action.dest == "help":
            continue
        value = "1" if action.nargs == 0 else SAMPLES.get(action.dest, "2")
        flag = action.option_strings[-1]
        said = flags.parse([flag if action.nargs == 0 else f"{flag}={value}", "s.py"], {})
        found = flags.parse(["s.py"], {f"PET_{action.dest.upper()}": value})
        if action.dest != "node_rank":
            assert getattr(found, action.dest) == getattr(said, action.dest) not in (None, "", False)
        alone = action.dest == "node_rank"  # of one node: then it is that of another job
        assert found.variables == ({} if alone else {action.dest: f"PET_{action.dest.upper()}={value}"})
        off = flags.parse(["s.py"], {f"PET_{action.dest.upper()}": "0" if action.nargs == 0 else ""})
        assert getattr(off, action.dest) == getattr(flags.parse(["s.py"], {}), action.dest)


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ("--rdzv-backend=c10d", {}, "--rdzv-backend c10d does nothing: nodes meet at the job's controller"),
        ("", {"PET_RDZV_BACKEND": "c10d"}, "PET_RDZV_BACKEND=c10d does nothing: nodes meet"),
        ("--rdzv_conf timeout=900", {}, "--rdzv-conf timeout=900 does nothing: nodes meet"),
        ("--monitor-interval 1", {}, "--monitor-interval 1 does nothing: the end of a worker is noticed at"),
        ("--start_method=spawn", {}, "--start-method spawn does nothing: workers are forked"),
        ("--run-path", {}, "--run-path does nothing: scripts are run in that way anyway"),
        ("--virtual-local-rank", {}, "--virtual-local-rank does nothing: LOCAL_RANK is"),
        ("--numa-binding=node", {}, "--numa-binding node does nothing: workers are not bound"),
        ("--redirects 0:3,1:0", {}, "--redirects 0:3,1:0 does nothing: it is for all workers alike"),
        ("", {"PET_TEE": "0:3"}, "PET_TEE=0:3 does nothing"),
        ("--start-method fork", {"PET_START_METHOD": "nonsense"}, "--start-method fork does nothing"),
        ("--nnodes 2 --rdzv-id 3 --role trainer --tee 3 --local-ranks-filter 0 --max-restarts 0", {}, ""),
    ],
)
def test_what_does_nothing_is_said_to(words: str, environ: dict[str, str], said: str) -> None:
    found = torchrun.notes(flags.parse([*words.split(), "s.py"], environ))
    assert len(found) == bool(said) and all(note.startswith(said) for note in found)


def test_what_is_honoured(read: Read) -> None:
    settings, _ = read("--role trainer --rdzv-id 42 --local-ranks-filter 1,0", {})
    assert settings.environment == {"ROLE_NAME": "trainer", "TORCHELASTIC_RUN_ID": "42"}
    assert settings.local_ranks == [0, 1]
    assert torchrun.signals("SIGTERM,SIGUSR1, SIGINT") == [signal.SIGUSR1]
    with pytest.raises(ConfigError, match="there is no signal SIGNONE"):
        torchrun.signals("SIGNONE")


@pytest.mark.parametrize(
    ("words", "files", "console"),
    [("", 3, 3), ("-r 3", 3, 0), ("-r 1", 1, 2), ("-r 3 -t 3", 3, 3), ("-t 0", 3, 0), ("-t 0:1", 3, 3)],
)
def test_where_output_goes(words: str, files: int, console: int, read: Read) -> None:
    settings, _ = read(words, {})
    assert (settings.redirects, settings.tee) == (files, console)


def test_workers_as_torchrun_counts_them(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2, 5})
    assert read("--nproc-per-node=cpu", {})[0].nproc_per_node == 3
    for kind, found in (("gpu", torch.cuda), ("xpu", torch.xpu), ("auto", torch.accelerator)):
        monkeypatch.setattr(found, "is_available", lambda: True)
        monkeypatch.setattr(found, "device_count", lambda: 5)
        assert read("", {"PET_NPROC_PER_NODE": kind})[0].nproc_per_node == 5
        monkeypatch.setattr(found, "is_available", lambda: False)
        if kind != "auto":
            with pytest.raises(ConfigError, match=f"{kind}: torch sees no {kind.upper()} here"):
                read(f"--nproc-per-node {kind}", {})
    assert read("--nproc-per-node auto", {})[0].nproc_per_node == 3


@pytest.mark.parametrize(
    "words",
    [
        "-- s.py --x",
        "--nnodes 1 -- s.py -- --x",
        "s.py -- --x -- 1",
        "s.py --",
        "s.py --x -- --nnodes 3",
        "-m pkg.train --x",
    ],
)
def test_the_script_begins_where_torchrun_has_it(words: str) -> None:
    theirs = get_args_parser().parse_args(words.split())
    args = flags.parse(words.split(), {})
    assert args.command == [theirs.training_script, *theirs.training_script_args]


def test_beginnings_of_torchruns_flags(capfd: pytest.CaptureFixture[str]) -> None:
    """As argparse takes them there; the two spellings of a flag are one."""
    args = flags.parse("--nproc 2 --nnode=3 --rdzv-end=h:1 --node 1 --max 0 s.py".split(), {})
    assert (args.nproc_per_node, args.nnodes, args.rdzv_endpoint, args.node_rank) == ("2", "3", "h:1", 1)
    with pytest.raises(SystemExit):
        flags.parse("--st s.py".split(), {})
    assert "ambiguous option: --st could match --standalone, --start-method" in capfd.readouterr().err


@pytest.mark.parametrize("main", [launch.main, ctl.main])
def test_version(main: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and "(ft-training)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("main", "words", "meant"),
    [
        (launch.main, "--standalone --spare 1 s.py", "--spares"),
        (launch.main, "--nodes=2 s.py", "--nnodes"),
        (launch.main, "--ft-replica 2 s.py", "--ft-replicas"),
        (launch.main, "--node-rnk 2 s.py", "--node-rank"),
        (ctl.main, "status --jsn", "--json"),
    ],
)
def test_what_was_meant(
    main: Callable[[list[str]], int], words: str, meant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2 and f"did you mean {meant}?" in capfd.readouterr().err


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(Launcher, "_start", refuse)
    monkeypatch.delenv(SECRET_ENV, raising=False)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PET_NNODES", "0", "--nnodes '0': give a number of 1 or more (the environment says PET_NNODES=0)"),
        ("PET_STANDALONE", "yes", "PET_STANDALONE='yes': give 0 or 1"),
        ("PET_STANDALONE", "", "PET_STANDALONE='': give 0 or 1"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_wrong_variables(
    name: str,
    value: str,
    said: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert launch.main([script]) == 2
    assert capfd.readouterr().err == f"ftrun: {said}\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nif True print(1)\n", "line 2: invalid syntax: if True print(1)"),
        ("return 1\n", "line 1: 'return' outside function"),
        ("# -*- coding: none -*-\n", "unknown encoding"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_script_that_python_would_refuse(
    source: str, said: str, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(source)
    assert launch.main(["--standalone", "--nnodes=2", script]) == 2
    assert said in capfd.readouterr().err


def test_scripts_that_are_as_they_are(script: str, read: Read) -> None:
    """Warnings, another encoding, an archive, a shell script under --no-python."""
    Path(script).write_bytes(b"# -*- coding: latin-1 -*-\nx = '\\d \xe9'\nassert (1, 'x')\n")
    read("--standalone", {})
    Path(script).write_bytes(b"PK\x03\x04\0\0")
    read("--standalone", {})
    Path(script).write_text("if true; then echo; fi\n")
    read("--standalone --no-python", {})
    with pytest.raises(ConfigError, match="give --no-python"):
        read("--standalone", {})


@pytest.mark.usefixtures("nothing_starts")
def test_nodes_that_can_have_no_secret_in_common(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    assert launch.main([*words, script]) == 2
    assert f"{SECRET_ENV} is not set: set it to the same on all nodes" in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
def test_a_secret_that_is_drawn_is_said(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    with pytest.raises(AssertionError, match="a process was started"):
        launch.main([*words, f"--job-dir={tmp_path / 'job'}", script])
    assert f"{SECRET_ENV} is not set: the job's secret is drawn" in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
def test_a_log_directory_is_used_again(script: str, tmp_path: Path) -> None:
    """As torchrun does, by a directory of its own for each run."""
    for _ in range(2):
        with pytest.raises(AssertionError, match="a process was started"):
            launch.main(["--standalone", f"--log-dir={tmp_path / 'deep' / 'logs'}", script])
    found = list((tmp_path / "deep" / "logs").iterdir())
    assert len(found) == 2 and all((path / "job.json").exists() for path in found)


def test_a_name_that_is_known_a_little_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[bool] = iter([False, False, True])

    def look_up(host: str, _: None) -> None:
        assert host == "job-node-0-0.job"
        if not next(answers):
            raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("time.sleep", lambda _: None)
    launch._wait_for_name("job-node-0-0.job:29400")
    assert console().flush(20)
    assert capfd.readouterr().err.count("has no address yet") == 1
    monkeypatch.setattr(launch, "_NAME_KNOWN", -1.0)
    answers = iter([False])
    with pytest.raises(ConfigError, match="where the controller is to be, is the name of no machine"):
        launch._wait_for_name("job-node-0-0.job:29400")


# -- with processes ------------------------------------------------------------------------------------

FTRUN = [sys.executable, "-m", "ft_core.cli.launch"]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("numbered", [True, False])
def test_two_pods_train_together(numbered: bool, tmp_path: Path) -> None:
    """Told apart by the environment alone; or, as with torchrun's backend c10d, by where the first one is."""
    port = free_port()
    script = tmp_path / "sum.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('sum', total.item(), os.environ['ROLE_NAME'], flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    about = {**environment(), SECRET_ENV: "of these two pods", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    about |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_ROLE": "trainer"}
    pods: list[subprocess.Popen[str]] = []
    for rank in ("0", "1"):
        if numbered:
            given = about | ({"PET_NODE_RANK": rank} if rank == "0" else {"SLURM_NODEID": rank})
        else:
            given = about
            while pods and not _listens(port):
                assert pods[0].poll() is None
                time.sleep(0.05)
        command = [*FTRUN, f"--job-dir={tmp_path / rank}", "--", str(script)]
        pods.append(subprocess.Popen(command, env=given, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    try:
        said = [pod.communicate(timeout=110)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0]
    assert said == ["sum 2.0 trainer\n"] * 2


@pytest.mark.parametrize("flags", ["", "--signals-to-handle=SIGTERM,SIGUSR1"])
def test_a_node_that_waits_for_its_controller_ends_at_once(tmp_path: Path, flags: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    words = ["--nnodes=2", "--node-rank=1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", *flags.split()]
    command = [*FTRUN, *words, f"--job-dir={tmp_path / 'job'}", str(script)]
    about = {**environment(), SECRET_ENV: "of nobody else here"}
    with subprocess.Popen(command, env=about, cwd=ROOT, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stderr is not None
            assert "no controller answers" in job.stderr.readline()  # once it has tried for a while
            job.send_signal(signal.SIGUSR1 if flags else signal.SIGTERM)
            assert job.wait(60) == ENDED
        finally:
            job.kill()


def test_a_port_that_something_else_has(tmp_path: Path) -> None:
    script, port = tmp_path / "train.py", free_port()
    script.write_text("print('trained')\n")
    command = [*FTRUN, "--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{port}"]
    listen = ["import socket, sys", f"s = socket.create_server(('127.0.0.1', {port}))", "sys.stdin.read()"]
    other = [sys.executable, "-c", "\n".join([*listen[:2], "print('there', flush=True)", listen[2]])]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        about = {**environment(), SECRET_ENV: "of nobody else here"}
        done = subprocess.run(
            [*command, f"--job-dir={tmp_path / 'job'}", str(script)],
            **{"env": about, "cwd": ROOT, "timeout": 110},
            capture_output=True,
            text=True,
        )
        owner.kill()
    assert done.returncode == 1
    assert f"cannot listen at 127.0.0.1:{port}: " in done.stderr
    assert "Something else has that port on this machine" in done.stderr

"""Commands that the controller runs on events: `--ft-on`, `control.hooks`, and `recipes/hooks`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from harness import ROOT, environment, settings_of
from metadata import Reply, Service
from processes import alive

from ft_core.cli import launch
from ft_core.cli.launcher import Launcher
from ft_core.control import hooks
from ft_core.control.events import Record
from ft_core.control.hooks import Hooks, check, parse
from ft_core.errors import ConfigError
from ft_core.settings import SECRET_ENV, Command, Settings

LINE = '{"event": "avoided", "node": "node1", "reason": "node1 has failed\\n3 times"}\n'
RECORD = Record("avoided", 4, "it has failed 3 times", more={"node": "node1+ab12cd"})
ENDS = 60.0


def program(path: Path, text: str) -> str:
    """A shell script of that text."""
    path.write_text(f"#!/bin/sh\n{dedent(text)}")
    path.chmod(0o755)
    return str(path)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + ENDS
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)


def told(*commands: list[str], times: int = 1) -> Hooks:
    """All of these have been run."""
    found = Hooks([["avoided", *command] for command in commands], {"FT_JOB_ID": "j0b"})
    for _ in range(times):
        found.tell(RECORD, LINE)
        until(lambda: not found._threads, "end of the commands")
    return found


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged."""
    caplog.set_level(logging.INFO, logger=hooks.__name__)
    return lambda: [record.getMessage() for record in caplog.records]


# -- the flag ------------------------------------------------------------------------------------------


def test_flags(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    settings = settings_of(
        "--standalone", "--ft-on=drained=echo 'a b' c=d", "--ft-on", "drained=./x", str(script)
    )
    assert settings.hooks == [["drained", "echo", "a b", "c=d"], ["drained", str(Path("x").absolute())]]
    settings.write(tmp_path)
    assert Settings.read(tmp_path).hooks == settings.hooks
    assert settings_of("--standalone", str(script)).hooks == []


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("drained", "give EVENT=COMMAND"),
        ("condemned=true", "there is no event 'condemned'; there are started, "),
        ("=true", "there is no event ''"),
        ("saved=", "there is no command behind saved="),
        ("saved=  ", "there is no command behind saved="),
        ("saved='' x", "there is no command behind saved="),
        ("saved=echo 'x", "No closing quotation"),
        ("saved=no-such-program x", "no program 'no-such-program' on the PATH"),
        ("saved=/no/such x", "there is no program /no/such on this machine"),
        ("saved=/tmp", "there is no program /tmp on this machine"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_there(
    flag: str, named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launcher, "_start", lambda *_: pytest.fail("a process was started"))
    script = tmp_path / "train.py"
    script.touch()
    job_dir = tmp_path / "job"
    for where in (
        ["--standalone"],
        ["--nnodes=2", "--node-rank=1", "--ft-leadership=etcd://127.0.0.1:1/x"],
        ["--join=etcd://127.0.0.1:1/x"],
    ):
        assert launch.main([*where, f"--ft-on={flag}", f"--job-dir={job_dir}", str(script)]) == 2
        error = capfd.readouterr().err
        assert error.startswith("ftrun: --ft-on ") and named in error and error.count("\n") == 1
        assert not job_dir.exists()


def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    path = tmp_path / "hook"
    path.touch()
    with pytest.raises(ConfigError, match=rf"cannot be executed: chmod \+x {path}"):
        check([["saved", str(path)]])
    path.chmod(0o755)
    check([["saved", str(path)], ["saved", "sh", "-c", "true"]])


def test_a_machine_that_never_leads_need_not_have_the_program() -> None:
    settings = Settings(2, 1, Command("train.py"), hooks=[["saved", "/no/such"]])
    launch._check_hooks(settings)
    with pytest.raises(ConfigError):
        launch._check_hooks(settings, first=True)


# -- what a command gets -------------------------------------------------------------------------------


def test_a_command_has_the_event_and_no_secret(
    tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SECRET_ENV, "ETCDCTL_USER"):
        monkeypatch.setenv(name, "a-secret-of-the-job")
    monkeypatch.setenv("MINE", "kept")
    command = program(
        tmp_path / "hook", f'cat > {tmp_path}/in; env > {tmp_path}/env; echo "$@" > {tmp_path}/words'
    )
    told([command, "a  b", "$HOME", ";"])
    assert (tmp_path / "in").read_text() == LINE
    assert (tmp_path / "words").read_text() == "a  b $HOME ;\n", "there is no shell"
    env = (tmp_path / "env").read_text()
    assert "a-secret-of-the-job" not in env
    found = dict(line.partition("=")[::2] for line in env.splitlines())
    about = {"FT_EVENT": "avoided", "FT_NODE": "node1", "FT_JOB_ID": "j0b", "MINE": "kept"}
    assert {name: found.get(name) for name in about} == about
    assert said() == [], "quiet when all is well"


def test_a_command_need_not_read_what_it_is_told(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """More than a pipe holds."""
    found = Hooks([["avoided", "true"]], {})
    found.tell(RECORD, "x" * (1 << 20))
    found.finish(ENDS)
    assert said() == []


def test_only_its_own_event_runs_a_command(tmp_path: Path) -> None:
    command = ["sh", "-c", f"cat >> {tmp_path}/told"]
    found = Hooks([["saved", *command]], {})
    found.tell(RECORD, LINE)
    found.tell(Record("saved", 4), "{}\n")
    found.finish(ENDS)
    assert (tmp_path / "told").read_text() == "{}\n"


def test_signals_are_as_they_are_by_default(tmp_path: Path) -> None:
    """A controller that ends, or was elected, ignores SIGTERM; what a command ends by it must not."""
    text = "from ft_core.control.hooks import *; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    text += f"h = Hooks([['avoided', 'sh', '-c', 'kill $$; touch {tmp_path}/lives']], {{}})\n"
    text += "h.tell(Record('avoided', 1), '')\nh.finish(60)\n"
    done = subprocess.run([sys.executable, "-c", text], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "was killed by signal 15" in done.stderr
    assert not (tmp_path / "lives").exists()


# -- what a command does -------------------------------------------------------------------------------


def test_a_failure_is_said_once_until_it_works(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    command = program(tmp_path / "hook", f"echo well; echo no route to you >&2; exit $(cat {tmp_path}/code)")
    (tmp_path / "code").write_text("3")
    found = told([command, "token"], times=3)
    [message] = said()
    assert message.startswith(f"--ft-on avoided={command} (node node1, epoch 4) has failed ")
    assert "exit code 3: no route to you. " in message and "token" not in message
    for code in ("0", "3", "4", "3"):
        (tmp_path / "code").write_text(code)
        found.tell(RECORD, LINE)
        until(lambda: not found._threads, "end of the command")
    assert [text.partition("exit code ")[2][0] for text in said()] == ["3", "3", "4"]


def test_a_command_that_cannot_be_run_any_more(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    told([str(tmp_path / "gone")], times=2)
    [message] = said()
    assert "could not be run: No such file or directory" in message


def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "LIMIT", 1.0)
    told([program(tmp_path / "hook", f"echo here\nsleep 1000 &\necho $! > {tmp_path}/pid\nwait")])
    [message] = said()
    assert "took longer than 1 s, and was ended: here" in message
    until(lambda: not alive(int((tmp_path / "pid").read_text())), "end of what it has started")


def test_a_command_that_says_a_lot(said: Callable[[], list[str]]) -> None:
    told(["sh", "-c", "head -c 30000000 /dev/zero; echo; printf 'the \\033[1m end'; exit 1"])
    [message] = said()
    assert "exit code 1: the  [1m end. " in message and len(message) < 1000


def test_what_holds_the_output_open_is_not_waited_for(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """What is in the command's process group goes with it; a daemon, in a session of its own, stays."""
    text = f"""\
        sleep 1000 &
        echo $! > {tmp_path}/beside
        setsid sh -c 'echo $$ > {tmp_path}/daemon; exec sleep 1000' &
        while [ ! -s {tmp_path}/daemon ]; do sleep 0.01; done
        echo gone on"""
    told([program(tmp_path / "hook", text)])
    daemon, beside = (int((tmp_path / name).read_text()) for name in ("daemon", "beside"))
    try:
        assert said() == [] and alive(daemon)
        until(lambda: not alive(beside), "end of what runs beside")
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_a_daemon_that_goes_on_talking_is_not_waited_for(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    text = f"""\
        setsid sh -c 'echo $$ > {tmp_path}/daemon; exec yes' &
        while [ ! -s {tmp_path}/daemon ]; do sleep 0.01; done"""
    told([program(tmp_path / "hook", text)])
    assert said() == []
    until(lambda: not alive(int((tmp_path / "daemon").read_text())), "end of what nobody listens to")


def test_a_few_run_at_once_and_others_wait_and_more_are_not_run(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    found = Hooks([["avoided", "sh", "-c", f"echo x >> {tmp_path}/begun; read x < {gate}; true"]], {})
    begun = tmp_path / "begun"
    for _ in range(hooks.AT_ONCE):
        found.tell(RECORD, LINE)
    until(lambda: begun.exists() and len(begun.read_text().split()) == hooks.AT_ONCE, "beginning")
    for _ in range(hooks.WAITING + 3):
        found.tell(RECORD, LINE)
    assert len(begun.read_text().split()) == hooks.AT_ONCE == found._threads
    [message] = said()
    assert f"was not run: {hooks.WAITING} others wait already" in message
    writer = os.open(gate, os.O_RDWR)
    os.write(writer, b"\n" * 200)
    found.finish(ENDS)
    os.close(writer)
    assert len(begun.read_text().split()) == hooks.AT_ONCE + hooks.WAITING


# -- the end ---------------------------------------------------------------------------------------------


def test_the_jobs_end_ends_what_runs(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """And what waits is not begun."""
    command = ["sh", "-c", f"echo $$ >> {tmp_path}/pids; exec sleep 1000"]
    found = Hooks([["avoided", *command]] * (hooks.AT_ONCE + 1), {})
    found.tell(RECORD, LINE)
    pids = tmp_path / "pids"
    until(lambda: pids.exists() and len(pids.read_text().split()) == hooks.AT_ONCE, "beginning")
    found.finish(1.0 + hooks._KILLED)
    until(lambda: not found._threads, "end of the threads")
    assert not any(alive(int(pid)) for pid in pids.read_text().split())
    assert len(pids.read_text().split()) == hooks.AT_ONCE
    assert [
        "was not run: the job is over" in text or "was ended with the job" in text for text in said()
    ] == [
        True,
        True,
    ]
    found.tell(RECORD, LINE)
    assert not found._threads


def test_who_leads_no_more_begins_none_and_ends_none(tmp_path: Path) -> None:
    done = tmp_path / "done"
    text = f"touch {tmp_path}/begun; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo x >> {done}"
    found = Hooks([["avoided", "sh", "-c", text]] * (hooks.AT_ONCE + 5), {})
    found.tell(RECORD, LINE)
    until((tmp_path / "begun").exists, "beginning")
    until(lambda: len(found._running) == hooks.AT_ONCE, "beginning")
    found.close()
    (tmp_path / "go").touch()
    until(lambda: not found._threads, "end of the commands")
    assert done.read_text().split() == ["x"] * hooks.AT_ONCE


def test_the_limit_holds_though_the_controller_is_killed(tmp_path: Path) -> None:
    text = "import time; from ft_core.control import hooks; from ft_core.control.events import Record\n"
    text += "hooks.LIMIT = 3.0\n"
    text += (
        f"h = hooks.Hooks([['avoided', 'sh', '-c', 'sleep 1000 & echo $! > {tmp_path}/pid; wait']], {{}})\n"
    )
    text += "h.tell(Record('avoided', 1), '')\ntime.sleep(1000)\n"
    controller = subprocess.Popen([sys.executable, "-c", text], env=environment())
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "beginning")
    finally:
        controller.kill()
        controller.wait()
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not alive(pid), "end of the command")


# -- recipes ---------------------------------------------------------------------------------------------


def stand_in(directory: Path, name: str, text: str) -> None:
    """A program that notes how it was called, in the file of its name with `.calls`."""
    directory.mkdir(exist_ok=True)
    note = f"""for word; do printf '%s\\n' "$word"; done >> {directory}/{name}.calls\n"""
    program(directory / name, note + dedent(text))


def calls(directory: Path, name: str) -> list[str]:
    return (directory / f"{name}.calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("node", "machine"),
    [
        ("gpu-1-1", "gpu-1"),
        ("gpu-1", "gpu-1"),
        ("gpu-3.site.example-2", "gpu-3"),
        ("gpu-3.site.example", "gpu-3"),
        ("gpu-9", None),
        ("gpu-1-7", None),
    ],
)
def test_slurm_is_told(node: str, machine: str | None, tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    stand_in(bin_, "scontrol", "if [ $1 = show ]; then printf 'gpu-0\\ngpu-1\\ngpu-3\\n'; fi")
    env = {
        **os.environ,
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "FT_NODE": node,
        "SLURM_JOB_NODELIST": "gpu-[0-1,3]",
    }
    command = ROOT / "recipes" / "hooks" / "slurm_drain.sh"
    done = subprocess.run([command], env=env, input=LINE, capture_output=True, text=True)
    asked, said = calls(bin_, "scontrol")[:3], calls(bin_, "scontrol")[3:]
    assert asked == ["show", "hostnames", "gpu-[0-1,3]"]
    if machine is None:
        assert done.returncode == 1 and f"called {node}" in done.stderr and not said
        return
    assert done.returncode == 0, done.stderr
    reason = "reason=ft: node1 has failed 3 times"
    assert said == ["update", f"nodename={machine}", "state=drain", reason]


@pytest.mark.parametrize("how", ["cordon", "condition"])
def test_kubernetes_is_told(how: str, tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    pods = 'if [ $1 = get ]; then case "$4" in *gpt-node-0-3\\"*) printf "old-machine machine7";; esac; fi'
    stand_in(bin_, "kubectl", pods)
    env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}
    command = [str(ROOT / "recipes" / "hooks" / "kubernetes_node.sh"), how]
    for node in ("gpt-node-0-3-3", "gpt-node-0-3"):
        (bin_ / "kubectl.calls").unlink(missing_ok=True)
        done = subprocess.run(
            command, env=env | {"FT_NODE": node}, input=LINE, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found = calls(bin_, "kubectl")
        if how == "cordon":
            assert found[-2:] == ["cordon", "machine7"]
            continue
        *words, patch = found[-5:]
        assert (
            words == ["patch", "node", "machine7", "--subresource=status", "--type=strategic"][-len(words) :]
        )
        [condition] = json.loads(patch.removeprefix("--patch="))["status"]["conditions"]
        assert condition["message"] == "node1 has failed\n3 times" and condition["status"] == "True"
    done = subprocess.run(
        command, env=env | {"FT_NODE": "other-1"}, input=LINE, capture_output=True, text=True
    )
    assert done.returncode == 1 and "other-1" in done.stderr


class Cluster(Service):
    """The API server of a Kubernetes with a pod that was replaced on another machine."""

    def __init__(self) -> None:
        super().__init__()
        self.patched: list[tuple[str, str, dict[str, Any]]] = []
        """Path, content type, patch."""

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        place = path.partition("?")[0]
        node = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": "machine7"}, "spec": {}}
        if method == "PATCH":
            self.patched.append((place, headers["content-type"], json.loads(body)))
            return self._found(node)
        kinds = [("pods", "Pod", True), ("nodes", "Node", False), ("nodes/status", "Node", False)]
        about = [
            {
                "name": name,
                "kind": kind,
                "namespaced": inside,
                "singularName": "",
                "verbs": ["get", "list", "patch"],
            }
            for name, kind, inside in kinds
        ]
        pods = [
            self._pod("x", "other", 3, "x"),
            self._pod("new", "machine7", 2),
            self._pod("old", "machine2", 1),
        ]
        known = {
            "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": about},
            "/api/v1/namespaces/ml/pods": {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {},
                "items": pods,
            },
            "/api/v1/nodes/machine7": node,
            "/api/v1/nodes/machine7/status": node,
        }
        return self._found(known[place]) if place in known else (404, {}, b"{}")

    @staticmethod
    def _found(what: dict[str, Any]) -> Reply:
        return 200, {"Content-Type": "application/json", "Connection": "close"}, json.dumps(what).encode()

    @staticmethod
    def _pod(name: str, machine: str, day: int, host: str = "gpt-node-0-3") -> dict[str, Any]:
        about = {"name": name, "namespace": "ml", "creationTimestamp": f"2026-11-0{day}T06:00:00Z"}
        spec = {"hostname": host, "nodeName": machine, "containers": []}
        return {"kind": "Pod", "apiVersion": "v1", "metadata": about, "spec": spec}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="left out: there is no kubectl")
@pytest.mark.parametrize("how", ["cordon", "condition"])
def test_a_real_kubectl_is_understood(how: str, tmp_path: Path) -> None:
    cluster = Cluster()
    with cluster.serving() as (host, port):
        server = {"name": "c", "cluster": {"server": f"http://{host}:{port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "", "namespace": "ml"}}
        config = {"kind": "Config", "clusters": [server], "contexts": [context], "current-context": "c"}
        (tmp_path / "config").write_text(json.dumps(config))
        env = {**os.environ, "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "config")}
        command = [str(ROOT / "recipes" / "hooks" / "kubernetes_node.sh"), how]
        env["FT_NODE"] = "gpt-node-0-3-3"
        done = subprocess.run(command, env=env, input=LINE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.stderr, cluster.asked)
    [(path, kind, patch)] = cluster.patched
    assert kind == "application/strategic-merge-patch+json"
    if how == "cordon":
        assert (path, patch) == ("/api/v1/nodes/machine7", {"spec": {"unschedulable": True}})
    else:
        assert path == "/api/v1/nodes/machine7/status"
        assert [each["type"] for each in patch["status"]["conditions"]] == ["TrainingAvoids"]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An address, and what is posted there."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.headers["Content-Type"], body))
            self.send_response(500 if self.path == "/broken" else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_a_webhook_is_told_as_the_page_says(
    webhook: tuple[str, list[tuple[str, bytes]]], said: Callable[[], list[str]]
) -> None:
    page = (ROOT / "docs" / "operations" / "watch.md").read_text()
    [line] = [line.strip() for line in page.splitlines() if "=curl" in line]
    url, posted = webhook
    assert line.count("https://HOST/PATH") == 1
    for path in ("here", "broken"):
        flag = subprocess.run(
            [
                "sh",
                "-c",
                f"printf %s {line.replace('https://HOST/PATH', f'{url}/{path}').removeprefix('--ft-on ')}",
            ],
            capture_output=True,
            text=True,
        ).stdout
        [hook] = parse([flag])
        found = Hooks([hook], {})
        found.tell(Record("waiting", 1), LINE)
        found.finish(ENDS)
    assert posted == [("application/json", LINE.encode())] * 2
    [message] = said()
    assert "has failed with exit code 22: curl: (22)" in message and "127.0.0.1" not in message

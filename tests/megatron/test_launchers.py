"""The recipes for one machine, Slurm and Kubernetes: their own files, with schedulers that start it all here.

There is no cluster. What stands in for `srun` and `scontrol` keeps to what their manual pages say of the
flags that matter; "nodes" are process trees of this machine, as they are with `ftrun --standalone`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib import request

import pytest

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import yaml
from harness import (
    ROOT,
    TINY,
    Layout,
    different,
    environment,
    read_digest,
    read_logs,
    read_losses,
    reference,
    settings_of,
)
from ports import free_port

from ft_core.cli import failure_domains
from ft_core.cli.ask import status
from ft_core.node import metrics
from ft_core.process.sigterm import ENDED, GRACE
from ft_core.protocol import http
from ft_core.settings import SECRET_ENV, Settings

RECIPES = ROOT / "recipes" / "megatron"
ITERATIONS = 70
"""The script of these tests stops at step 60 until it is let go."""
PAIR = Layout(1, 1, 2)
SECRET = "the secret of these tests"

SRUN = """#!/usr/bin/env bash
# Starts its command once per task. One that ends badly ends all, unless it is told not to.
tasks=1 kill=1 overlap=
while [[ $1 == -* ]]; do
    echo "$1" >> "$FAKE/srun"
    case $1 in --ntasks=*) tasks=${1#*=} ;; --kill-on-bad-exit=0) kill= ;; --overlap) overlap=1 ;; esac
    shift
done
if [ -n "$overlap" ]; then echo "$*" >> "$FAKE/overlapping"; exec "$@"; fi
echo $$ > "$FAKE/step"
trap 'kill -TERM $(jobs -p)' TERM
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i setsid "$@" & done
worst=0
for ((i = 0; i < tasks; i++)); do
    code=0
    wait -n || code=$?
    if [ "$code" -gt "$worst" ]; then worst=$code; fi
    if [ "$code" -ne 0 ] && [ -n "$kill" ]; then kill -KILL $(jobs -p); fi
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> "$FAKE/scontrol"
if [ "$2" = hostnames ]; then for ((i = 0; i < SLURM_NNODES; i++)); do echo localhost; done; fi
"""
SCANCEL = """#!/usr/bin/env bash
kill -TERM "$(cat "$FAKE/step")"
"""
RECORD = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$FAKE/ftrun"
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Programs that stand in for others, first in the PATH of `start`."""

    def make(**programs: str) -> Path:
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        (tmp_path / "records").mkdir(exist_ok=True)
        return tmp_path / "records"

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Runs a program of the recipes as a scheduler would; ends what is left of it."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: object, **more: str) -> subprocess.Popen[bytes]:
        path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {**environment(), "PATH": path, "FAKE": str(tmp_path / "records"), SECRET_ENV: SECRET, **more}
        output = (tmp_path / f"console-{len(started)}").open("w")
        started.append(
            subprocess.Popen(
                [*map(str, command)],
                env=given,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before {what}"
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def get(address: str, path: str) -> str:
    with request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def events(directory: Path) -> list[dict]:
    path = directory / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def output(job_dir: Path) -> str:
    return "\n".join(read_logs(directory) for directory in sorted(job_dir.iterdir()) if directory.is_dir())


def step(job_dir: Path) -> int:
    return max(read_losses(output(job_dir)), default=0) if job_dir.exists() else 0


def check_same(job_dir: Path) -> None:
    """Losses and final state of an undisturbed run under torchrun."""
    expected = reference(PAIR, ITERATIONS)
    assert read_losses(output(job_dir)) == expected.losses
    assert read_digest(output(job_dir)) == expected.digest


@pytest.mark.long
def test_slurm(
    fake: Callable[..., Path], start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Of two nodes and a spare one is killed: the spare takes over, and the node comes back as the next."""
    records = fake(srun=SRUN, scontrol=SCONTROL, scancel=SCANCEL)
    job_dir, gate, port = tmp_path / "job", tmp_path / "gate", free_port()
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[0-2]"}
    about = {"JOB_DIR": str(job_dir), "PORT": str(port), "NPROC": "1", "FT_TEST_GATE": str(gate)}
    about |= {"METRICS_PORT": str(free_port()), "TARGETS": str(tmp_path)}
    script = {"SCRIPT": str(ROOT / "tests/megatron/gated.py")}
    batch = start(
        *("bash", RECIPES / "slurm.sbatch", *PAIR.arguments(ITERATIONS, True)), **slurm, **about, **script
    )
    until(lambda: step(job_dir) >= 3, batch, "step 3")
    [group] = json.loads((tmp_path / "ft-slurm-4711.json").read_text())  # as Prometheus reads it
    assert group["labels"]["slurm_job"] == "4711"
    controller, *nodes = group["targets"]
    assert "\nft_step " in get(controller, "/metrics")
    assert nodes == [f"localhost:{int(controller.rpartition(':')[2]) + 1}"] * 3  # all are this machine here
    roles = status(None, f"localhost:{port}").roles
    os.killpg(next(row.agent_pid for row in roles if row.role == 1 and row.agent_pid), signal.SIGKILL)
    until(
        lambda: len([e for e in events(job_dir / "0") if e["event"] == "joined"]) == 4,
        batch,
        "the node again",
    )
    gate.touch()
    assert batch.wait(90) == 0
    assert [e["roles"] for e in events(job_dir / "0") if e["event"] == "decided"] == [[], [1]]
    check_same(job_dir)
    assert not list(tmp_path.glob("ft-slurm-*"))
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0"} <= set((records / "srun").read_text().split())
    assert "requeue" not in (records / "scontrol").read_text()


def test_slurm_preempts(
    fake: Callable[..., Path], start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """USR1 to the batch script gets to a worker as SIGTERM; what then ends well goes back into the queue."""
    records = fake(srun=SRUN, scontrol=SCONTROL, scancel=SCANCEL)
    script, ready, job_dir = tmp_path / "train.py", tmp_path / "ready", tmp_path / "job"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "left = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: left.append(1))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "while not left: time.sleep(0.05)\n"
        "print('saved')\n"
    )
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n0"}
    about = {"JOB_DIR": str(job_dir), "PORT": str(free_port()), "NPROC": "1", "SCRIPT": str(script)}
    batch = start("bash", RECIPES / "slurm.sbatch", "--any", **slurm, **about)
    until(ready.exists, batch, "the script")
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(90) == 0
    assert "saved" in output(job_dir)
    assert "requeue 4711" in (records / "scontrol").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("gpu-2-1+0369bb", "gpu-3"),
        ("gpu-3.cluster-1+0369bb", "gpu-3"),
        ("gpu-3+0369bb", "gpu-3"),  # its processes were killed, and it has come back
        ("gpu-2+0369bb", "gpu-2"),
        ("login.cluster-1+0369bb", "gpu-3"),  # Slurm calls it otherwise than it does itself
    ],
)
def test_slurm_finds_the_node_of_a_worker(
    fake: Callable[..., Path],
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    name: str,
    host: str,
) -> None:
    """By what the node is called in the job: elsewhere the number of its process is another one's."""
    role = {"roles": [{"node": "gpu-2-0+0", "worker_pid": None}, {"node": name, "worker_pid": 4711}]}
    end, begun = tmp_path / "end", tmp_path / "begun"
    srun = f"""
    case "$*" in
        *--overlap*) echo "$*" > "$FAKE/overlapping"; touch {end} ;;
        *) touch {begun}; until [ -e {end} ]; do sleep 0.1; done; echo 3 > "$JOB_DIR/exit-code" ;;
    esac"""
    programs = {
        "srun": srun,
        "scontrol": 'if [ "$2" = hostnames ]; then echo gpu-2; echo gpu-3; fi',
        "ftctl": f"echo '{json.dumps(role)}'",
    }
    records = fake(**{each: f"#!/usr/bin/env bash\n{text}\n" for each, text in programs.items()})
    about = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu-[2-3]"}
    batch = start("bash", RECIPES / "slurm.sbatch", "--any", JOB_DIR=str(tmp_path / "job"), **about)
    until(begun.exists, batch, "srun")
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(60) == 3
    told = (records / "overlapping").read_text().split()
    assert f"--nodelist={host}" in told and told[-3:] == ["kill", "-TERM", "4711"]


def pod() -> tuple[dict, dict, dict[str, str]]:
    """The job and the container of kubernetes.yaml, and the container's environment."""
    jobset, _ = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    name = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    label = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    values = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert container["env"][[*values].index("RDZV_ID")]["valueFrom"] == label
    values["RDZV_ID"] = "0f3a-the-uid-of-a-job"
    assert values["HEAD"].partition(":")[0] == name  # what JobSet calls the first pod
    return job, container, values


@pytest.mark.long
def test_kubernetes(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """The first pod is deleted, and the controller with it; the one that replaces it takes the job over."""
    _, container, values = pod()
    about = {**values, "HEAD": f"127.0.0.1:{free_port()}", "NNODES": "2", "NPROC": "1"}
    gate = tmp_path / "gate"
    about |= {"SCRIPT": str(ROOT / "tests/megatron/gated.py"), "FT_TEST_GATE": str(gate)}

    def begin(index: int, volume: str) -> subprocess.Popen[bytes]:
        given = {**about, "JOB_COMPLETION_INDEX": str(index), "JOB_DIR": str(tmp_path / "job" / volume)}
        return start(*container["command"], *PAIR.arguments(ITERATIONS, True), **given)

    first, *others = [begin(index, f"pod-{index}") for index in range(3)]
    volumes = tmp_path / "job"
    until(lambda: any(step(volumes / f"pod-{i}") >= 3 for i in range(2)), first, "step 3")
    first.terminate()
    gate.touch()
    assert first.wait(60) == 143
    again = begin(0, "pod-new")
    new = volumes / "pod-new" / "0"
    assert again.wait(90) == 0
    assert [other.wait(60) for other in others] == [0, 0]
    told = [*events(volumes / "pod-0" / "0"), *events(new)]
    assert [e["roles"] for e in told if e["event"] == "decided"] == [[], [0]]  # by the old one or the new one
    assert len([e for e in told if e["event"] == "controller_restarted"]) == 1
    logs = "\n".join(output(volume) for volume in volumes.iterdir())
    expected = reference(PAIR, ITERATIONS)
    # The new pod has not the logs of the old one: it may print a line that is there already.
    assert different(read_losses(logs)) == expected.losses and read_digest(logs) == expected.digest


@pytest.mark.long
def test_a_pod_is_deleted_and_its_roles_move(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """SIGTERM to one of several: no step is done again, and nobody fails."""
    _, container, values = pod()
    volumes, awaited = tmp_path / "job", tmp_path / "awaited"
    about = {**values, "HEAD": f"127.0.0.1:{free_port()}", "NNODES": "2", "NPROC": "1"}
    about |= {"SCRIPT": str(ROOT / "tests/chaos/paced.py"), "FT_TESTS_AWAITED": str(awaited)}

    def begin(index: int) -> subprocess.Popen[bytes]:
        given = {**about, "JOB_COMPLETION_INDEX": str(index), "JOB_DIR": str(volumes / f"pod-{index}")}
        return start(*container["command"], *PAIR.arguments(ITERATIONS, True), **given)

    first, deleted, spare = [begin(index) for index in range(3)]

    def told(name: str) -> list[dict]:
        return [event for event in events(volumes / "pod-0" / "0") if event["event"] == name]

    until(lambda: len(told("joined")) == 3 and bool(told("resumed")), first, "three nodes")
    deleted.terminate()
    until(lambda: bool(told("drained")), first, "the drain")
    assert deleted.wait(60) == 143
    awaited.touch()
    assert [first.wait(90), spare.wait(60)] == [0, 0]
    assert [event["roles"] for event in told("moving")] == [[1]] and not told("detected")
    logs = "\n".join(output(volume) for volume in volumes.iterdir())
    expected = reference(PAIR, ITERATIONS)
    assert read_losses(logs) == expected.losses and read_digest(logs) == expected.digest


def recorded(records: Path) -> tuple[Settings, list[str]]:
    """What ftrun's own parser makes of the flags it was given; and the flags."""
    words = (records / "ftrun").read_text().splitlines()
    return settings_of(*words), words


def test_command_lines(
    fake: Callable[..., Path],
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes' and the one machine's are such as ftrun takes; nodes beyond NNODES are spares."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    records = fake(ftrun=RECORD, getent="#!/bin/sh\n")
    job, container, values = pod()
    values["JOB_DIR"] = str(tmp_path / "job")
    nodes, pods = int(values["NNODES"]), job["completions"]
    assert job["parallelism"] == pods > nodes and job["completionMode"] == "Indexed"
    for index in (0, pods - 1):
        given = {**values, "JOB_COMPLETION_INDEX": str(index), "FT_FLAGS": "--ft-replicas 2 --ft-policy stop"}
        assert start(*container["command"], *container["args"], **given).wait(60) == 0
        settings, words = recorded(records)
        assert (settings.nnodes, settings.controller) == (nodes, values["HEAD"])
        assert settings.run_id == values["RDZV_ID"]
        assert values["NPROC"] == "gpu" and settings.nproc_per_node == 8
        assert (settings.replicas, settings.policy) == (2, "stop")
        assert words[words.index("--node-rank") + 1] == str(index)
        assert settings.command.target == values["SCRIPT"] and "--ft" in settings.command.arguments
        assert words[words.index("--job-dir") + 1] == f"{values['JOB_DIR']}/{index}"
    assert start(RECIPES / "one_machine.sh", NNODES="3", NPROC="2", SPARES="2").wait(60) == 0
    settings, words = recorded(records)
    assert (settings.nnodes, settings.nproc_per_node, settings.spares) == (3, 2, 2)
    assert "--standalone" in words and "--ft" in settings.command.arguments
    assert (
        start(RECIPES / "one_machine.sh", *TINY, "--ft", SCRIPT=str(RECIPES / "pretrain_gpt_core.py")).wait(
            60
        )
        == 0
    )
    assert recorded(records)[0].command.arguments == [*TINY, "--ft"]


@pytest.mark.parametrize(("code", "again"), [(0, 0), (1, 0), (2, 0), (3, 0), (9, 1), (137, 1), (143, 0)])
def test_a_node_comes_back_if_its_processes_were_killed(
    fake: Callable[..., Path],
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    code: int,
    again: int,
) -> None:
    """And not with a verdict of the job's, among which are all exit codes of its script."""
    ftrun = f'echo "$*" >> "$FAKE/calls"; [ "$(wc -l < "$FAKE/calls")" -eq 1 ] || exit 0; exit {code}'
    records = fake(ftrun=f"#!/bin/sh\n{ftrun}\n", ftctl="#!/bin/sh\n", getent="#!/bin/sh\n")
    about = {"HEAD": "h:1", "NNODES": "2", "NPROC": "1", "NODE_RANK": "1", "JOB_DIR": str(tmp_path / "job")}
    assert start(RECIPES / "node.sh", "--any", **about).wait(60) == (0 if again else code)
    first, *joined = (records / "calls").read_text().splitlines()
    assert "--node-rank 1" in first and len(joined) == again and all("--join h:1" in call for call in joined)


def test_pods_survive_what_they_should() -> None:
    """Memory for NCCL, a secret; disruptions do not count as failures, and the job's own end does."""
    job, container, values = pod()
    spec = job["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert values["JOB_DIR"] in mounts and SECRET_ENV not in values
    assert [source["secretRef"]["name"] for source in container["envFrom"]] == ["gpt-secret"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    actions = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"]}
    assert actions["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["terminationGracePeriodSeconds"] > GRACE
    assert actions["FailJob"]["onExitCodes"]["operator"] == "NotIn" and "Ignore" in actions
    assert {9, 128 + signal.SIGKILL, ENDED} <= set(actions["FailJob"]["onExitCodes"]["values"])
    assert {1, 2, 3}.isdisjoint(actions["FailJob"]["onExitCodes"]["values"])
    assert spec["restartPolicy"] == "Never"  # podFailurePolicy needs it; a new pod takes the index
    assert job["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]


def test_pods_may_do_little() -> None:
    """No user root, no capability, no token; who elects a leader by a Lease may change that one."""
    job, container, _ = pod()
    spec = job["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["fsGroup"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == own
    account, lease, role, binding = yaml.safe_load_all((RECIPES / "kubernetes-lease.yaml").read_text())
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "update"]}
    assert role["rules"] == [rule | {"resourceNames": [lease["metadata"]["name"]]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]


def test_probes_and_scrapers_ask_where_something_answers() -> None:
    """By the flags of `ftrun`: the ports are those that are declared, annotated, selected and probed."""
    jobset, service = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    job, container, values = pod()
    flags = settings_of("--nnodes", "2", "--node-rank", "0", *values["FT_FLAGS"].split(), values["SCRIPT"])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert flags.http == f"0.0.0.0:{ports['ft-controller']}"  # which others reach
    assert flags.metrics == f"0.0.0.0:{ports['ft-node']}"
    pages = {}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container[kind]
        assert probe["httpGet"]["port"] == "ft-node" and probe["timeoutSeconds"] > http.SECONDS
        assert probe["httpGet"]["path"] in metrics.PAGES
        pages[kind] = probe["httpGet"]["path"]
    assert pages == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 10 * flags.silence_limit
    template = job["template"]["metadata"]["annotations"]
    for about, port in ((template, "ft-node"), (service["metadata"]["annotations"], "ft-controller")):
        assert about["prometheus.io/scrape"] == "true"
        assert about["prometheus.io/port"] == str(ports[port])
        assert about["prometheus.io/path"] in metrics.PAGES
    assert service["spec"]["ports"] == [
        {"name": "ft-controller", "port": ports["ft-controller"], "targetPort": "ft-controller"}
    ]
    assert service["spec"]["selector"]["jobset.sigs.k8s.io/jobset-name"] == jobset["metadata"]["name"]
    monitor = yaml.safe_load((ROOT / "recipes" / "monitoring" / "podmonitor.yaml").read_text())
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} == ports.keys()
    assert all(each["path"] in metrics.PAGES for each in monitor["spec"]["podMetricsEndpoints"])


def test_labels_of_a_pod_are_where_ftrun_looks_for_them() -> None:
    job, container, values = pod()
    [volume] = [each for each in job["template"]["spec"]["volumes"] if "downwardAPI" in each]
    [item] = volume["downwardAPI"]["items"]
    [mount] = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == volume["name"]]
    assert f"{mount}/{item['path']}" == f"/{failure_domains.LABELS}"
    assert item["fieldRef"] == {"fieldPath": "metadata.labels"}
    assert "NODE_NAME" in values  # what an operator's file may call the machine

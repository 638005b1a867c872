"""Who announces that a machine is about to go, each in its own protocol: `ft_core.node.notices`."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from metadata import AwsService, AzureService, GcpService, KubernetesService, Service

from ft_core.errors import ConfigError
from ft_core.node.events import Noticed
from ft_core.node.notices import daemon, http, watch, which
from ft_core.node.notices.clouds import Aws, Azure, Gcp
from ft_core.node.notices.clusters import Kubernetes, Slurm, slurm_notices
from ft_core.node.notices.http import Server
from ft_core.node.notices.notice import Notice, Source, moment
from ft_core.node.notices.operators import Command, File

SPOT = {"action": "terminate", "time": "2026-11-28T08:22:00Z"}
AT = 1795854120.0


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def looks(source: Source, *changes: Callable[[], object]) -> list[list[Notice]]:
    """What it says at first, and after each change."""

    async def look() -> list[list[Notice]]:
        found = [await source.look()]
        for change in changes:
            change()
            found.append(await source.look())
        return found

    return run(look())


def test_times() -> None:
    assert moment("2026-11-28T08:22:00Z") == moment("Sat, 28 Nov 2026 08:22:00 GMT") == AT
    assert moment("2026-11-28T08:22:00") == AT, "UTC, where nothing else is said"
    for wrong in ("soon", "", "99999-01-01T00:00:00Z", f"Sat, 28 Nov {9**30} 08:22:00 GMT"):
        with pytest.raises(ValueError):
            moment(wrong)


# -- AWS ---------------------------------------------------------------------------------------------------


def test_aws_says_when_a_spot_instance_ends() -> None:
    service = AwsService()
    with service.serving() as address:

        def action() -> None:
            service.action = SPOT

        none, found = looks(Aws(Server(*address)), action)
    assert none == [] and found == [Notice("AWS, spot/instance-action: terminate", AT)]
    assert service.asked[0] == "PUT /latest/api/token"
    assert len([line for line in service.asked if "token" in line]) == 1, "it is good for hours"


def test_aws_advises_to_leave() -> None:
    service = AwsService()
    service.rebalance = {"noticeTime": "2026-11-28T08:16:02Z"}
    with service.serving() as address:
        [[notice]] = looks(Aws(Server(*address)))
    assert "rebalance" in notice.reason and notice.at is None


def test_aws_token_that_has_run_out_is_replaced() -> None:
    service = AwsService()
    service.action = SPOT
    with service.serving() as address:

        def replaced() -> None:
            service.token = "second=="

        first, second = looks(Aws(Server(*address)), replaced)
    assert first == second != []


@pytest.mark.parametrize(
    "action",
    [{}, [], "terminate", {"action": "terminate"}, {"action": 3, "time": SPOT["time"]}, SPOT | {"time": "x"}],
)
def test_aws_garbage_is_an_error(action: object) -> None:
    service = AwsService()
    service.action = action
    with service.serving() as address, pytest.raises(ValueError):
        looks(Aws(Server(*address)))


# -- GCP ---------------------------------------------------------------------------------------------------


def test_gcp_tells_of_news_at_once() -> None:
    service, now = GcpService(), [1000.0]
    with service.serving() as address:
        source = Gcp(Server(*address, name="metadata.google.internal"), "preempted", lambda: now[0])

        async def wait() -> tuple[list[Notice], list[Notice], list[Notice]]:
            first = await source.look()
            waiting = asyncio.create_task(source.look())
            while len(service.asked) < 2:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            service.values["preempted"] = "TRUE"
            second = await waiting
            now[0] += 10
            service.values["preempted"] = "TRUE"
            source._etag = "0"
            return first, second, await source.look()

        first, second, third = run(wait())
    assert first == [] and second == third == [Notice("GCP, instance/preempted", 1030.0)]


@pytest.mark.parametrize(
    ("value", "goes"),
    [("NONE", False), ("MIGRATE_ON_HOST_MAINTENANCE", False), ("TERMINATE_ON_HOST_MAINTENANCE", True)],
)
def test_gcp_maintenance(value: str, goes: bool) -> None:
    service = GcpService()
    service.values["maintenance-event"] = value
    with service.serving() as address:
        [found] = looks(Gcp(Server(*address, name="metadata.google.internal"), "maintenance-event"))
    assert [notice.at for notice in found] == [None] * goes


def test_gcp_garbage_is_an_error() -> None:
    service = GcpService()
    service.values["preempted"] = "<html>sign in</html>"
    with service.serving() as address, pytest.raises(ValueError):
        looks(Gcp(Server(*address, name="metadata.google.internal"), "preempted"))


# -- Azure -------------------------------------------------------------------------------------------------


def event(kind: str = "Preempt", machine: str = "workers_3", **more: object) -> dict[str, Any]:
    about = {"EventId": f"id-{kind}-{machine}", "EventStatus": "Scheduled", "EventType": kind}
    about |= {"ResourceType": "VirtualMachine", "Resources": [machine], "Description": "Spot\nend"}
    return about | {"NotBefore": "Sat, 28 Nov 2026 08:22:00 GMT", "DurationInSeconds": -1, **more}


def test_azure_events_of_this_machine() -> None:
    service = AzureService()
    service.events = [event(), event(machine="workers_4"), event("Freeze"), event("Reboot", NotBefore="")]
    with service.serving() as address:
        source = Azure(Server(*address))

        async def look() -> list[Notice]:
            found = await source.look()
            await source.agree()
            return found

        found = run(look())
    assert found == [
        Notice("Azure, scheduled event Preempt: Spot end", AT),
        Notice("Azure, scheduled event Reboot: Spot end", None),
    ]
    assert service.started == ["id-Preempt-workers_3", "id-Reboot-workers_3"]


def test_azure_is_told_nothing_where_nothing_is_announced() -> None:
    service = AzureService()
    with service.serving() as address:
        source = Azure(Server(*address))

        async def look() -> None:
            assert await source.look() == []
            await source.agree()

        run(look())
    assert not [line for line in service.asked if line.startswith("POST")]


@pytest.mark.parametrize("events", [None, {}, ["x"], [{"EventType": "Reboot"}], [event(NotBefore="x")]])
def test_azure_garbage_is_an_error(events: Any) -> None:
    service = AzureService()
    service.events = events
    with service.serving() as address, pytest.raises(ValueError):
        looks(Azure(Server(*address)))


# -- Slurm -------------------------------------------------------------------------------------------------

NODE = """NodeName=gpu7 Arch=x86_64 CoresPerSocket=8
   CPUAlloc=2 CPUEfctv=2 CPUTot=2 CPULoad=0.05
   State={} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=debug
   BootTime=2026-11-28T05:00:00 SlurmdStartTime=2026-11-28T05:01:00
   Reason={}
"""


@pytest.mark.parametrize("state", ["ALLOCATED", "MIXED", "IDLE*", "ALLOCATED+CLOUD", "DOWN*"])
def test_slurm_states_that_say_nothing(state: str) -> None:
    assert slurm_notices(NODE.format(state, "none")) == []


@pytest.mark.parametrize(
    "state", ["ALLOCATED+DRAIN", "MIXED*+DRAIN", "ALLOCATED+CLOUD+DRAIN", "FAILING", "MIXED+REBOOT_REQUESTED"]
)
def test_slurm_wants_the_node_back(state: str) -> None:
    [notice] = slurm_notices(NODE.format(state, "new memory, slot 3 [root@2026-11-28T05:30:00]"))
    assert notice == Notice(f"Slurm, node state {state}: new memory, slot 3", None)


def test_slurm_garbage_is_an_error() -> None:
    with pytest.raises(ValueError):
        slurm_notices("slurm_load_node error: Unable to contact slurm controller\n")


def test_slurm_is_asked_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said").write_text(NODE.format("MIXED+DRAIN", "x [root@now]"))
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\ntest "$*" = "show node gpu7" && exec cat {tmp_path}/said\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    [[notice]] = looks(Slurm("gpu7", 5.0))
    assert notice.reason == "Slurm, node state MIXED+DRAIN: x"
    with pytest.raises(ValueError, match="ended with code 1"):
        looks(Slurm("gpu8", 5.0))


# -- Kubernetes --------------------------------------------------------------------------------------------


def kubernetes(address: tuple[str, int]) -> Kubernetes:
    return Kubernetes(Server(*address), lambda: {"Authorization": "Bearer token1"}, "ml", "gpt-0", 5.0)


def test_kubernetes_deletes_the_pod() -> None:
    service = KubernetesService()
    with service.serving() as address:
        none, found = looks(
            kubernetes(address),
            lambda: service.pod["metadata"].update(deletionTimestamp="2026-11-28T08:22:00Z"),
        )
    assert none == [] and found == [Notice("Kubernetes, the pod is being deleted", AT)]


@pytest.mark.parametrize(
    ("taint", "tolerations", "goes"),
    [
        ({"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}, [], True),
        ({"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}, [], True),
        ({"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}, [], True),
        ({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}, [], False),
        ({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}, [], False),
        ({"key": "maintenance", "effect": "NoExecute"}, [], True),
        ({"key": "maintenance", "effect": "NoExecute"}, [{"operator": "Exists"}], False),
        (
            {"key": "maintenance", "effect": "NoExecute"},
            [{"key": "maintenance", "operator": "Exists", "tolerationSeconds": 300}],
            True,
        ),
        (
            {"key": "team", "value": "llm", "effect": "NoExecute"},
            [{"key": "team", "value": "llm", "effect": "NoExecute"}],
            False,
        ),
    ],
)
def test_kubernetes_taints(taint: dict[str, str], tolerations: list[object], goes: bool) -> None:
    service = KubernetesService()
    service.pod["spec"]["tolerations"] = tolerations
    assert service.node is not None
    service.node["spec"]["taints"] = [taint]
    with service.serving() as address:
        [found] = looks(kubernetes(address))
    assert bool(found) is goes and all(taint["key"] in notice.reason for notice in found)


@pytest.mark.parametrize(("part", "value"), [("taints", 5), ("taints", [5]), ("tolerations", 5)])
def test_kubernetes_garbage_is_an_error(part: str, value: object) -> None:
    service = KubernetesService()
    assert service.node is not None
    (service.node if part == "taints" else service.pod)["spec"][part] = value
    with service.serving() as address, pytest.raises(ValueError):
        looks(kubernetes(address))


def test_kubernetes_answers_with_what_is_nested_too_deeply() -> None:
    service = KubernetesService()
    service.trouble = lambda: (200, {}, b"[" * (1 << 19))
    with service.serving() as address, pytest.raises(ValueError):
        looks(kubernetes(address))


def test_kubernetes_names_a_node_that_cannot_be_asked_for() -> None:
    service = KubernetesService()
    service.pod["spec"]["nodeName"] = "gpu7\r\nHost: elsewhere"
    with service.serving() as address, pytest.raises(ValueError):
        looks(kubernetes(address))


def test_kubernetes_may_not_read_nodes() -> None:
    """Then the pod alone is read."""
    service = KubernetesService()
    service.node = None
    with service.serving() as address:
        looks(kubernetes(address), lambda: None)
        assert len([line for line in service.asked if "nodes" in line]) == 1
        service.token = "token2"
        with pytest.raises(OSError, match="401"):
            looks(kubernetes(address))


# -- the operator's ----------------------------------------------------------------------------------------


def test_a_file_of_the_operators(tmp_path: Path) -> None:
    path, now = tmp_path / "notices", [1000.0]
    source = File(str(path), ["node1", "host7"], lambda: now[0])

    def later(text: str) -> Callable[[], object]:
        def write() -> None:
            now[0] += 10
            path.write_text(text)

        return write

    lines = "# of the week\nnode2 60 power\nhost7 60 new cooling # row 3\n"
    none, first, again, all_, gone = looks(
        source, later(lines), later(lines), later("* 2026-11-28T08:22:00Z\nnode1"), later("")
    )
    assert none == gone == []
    assert first == again == [Notice(f"file {path}: new cooling", 1070.0)], "its time runs"
    assert all_ == [Notice(f"file {path}", AT), Notice(f"file {path}", None)]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "notices"
    path.write_bytes(b"\xff\0\n* 2026-13-99T00 x\n")
    with pytest.raises(ValueError):
        looks(File(str(path), ["node1"]))
    with pytest.raises(OSError):
        looks(File(str(tmp_path), ["node1"]))


def test_a_command_of_the_operators(tmp_path: Path) -> None:
    found = looks(Command("sh -c 'echo \"$FT_NODE 30 $0\"' why", ["node1", "host7"], lambda: 1000.0))
    assert found == [[Notice("command sh: why", 1030.0)]]
    with pytest.raises(ValueError, match="code 3: broken"):
        looks(Command("sh -c 'echo broken >&2; exit 3'", ["node1"]))
    with pytest.raises(OSError):
        looks(Command(str(tmp_path / "nothing"), ["node1"]))


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """Also where a child of its own keeps what it prints into."""
    pid = tmp_path / "pid"
    with pytest.raises(TimeoutError, match="sh has not ended"):
        daemon.printed(["sh", "-c", f"sleep 50 & echo $! > {pid}; wait"], dict(os.environ), 2.0)
    os.kill(int(pid.read_text()), 9)


# -- HTTP --------------------------------------------------------------------------------------------------


class Silent(Service):
    """One that answers when it is too late."""

    def reply(self, *_: object) -> Any:
        time.sleep(1.0)
        return 200, {}, b""


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (lambda: (500, {}, b"<html>"), OSError),
        (lambda: (200, {}, b"\xff\xfe"), ValueError),
        (lambda: (301, {"Location": "http://elsewhere/"}, b""), OSError),
        (lambda: b"SSH-2.0-OpenSSH_9.2\r\n\r\n", ValueError),
        (lambda: b"", (OSError, ValueError)),
        (lambda: b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", ValueError),
        (lambda: (200, {}, b"x" * (2 << 20)), ValueError),
    ],
)
def test_trouble_is_an_error(trouble: Callable[[], Any], error: type[Exception]) -> None:
    service = AwsService()
    service.trouble = trouble
    with service.serving() as address, pytest.raises(error):
        looks(Aws(Server(*address)))


def test_chunks_are_put_together() -> None:
    service = AwsService()
    service.trouble = lambda: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    )
    with service.serving() as address:
        answer = run(http.ask(Server(*address), "GET", "/", {}))
    assert answer.body == b"abc"


def test_one_limit_holds_for_all_of_an_answer() -> None:
    with Silent().serving() as address, pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        run(http.ask(Server(*address), "GET", "/", {}, limit=0.2))


# -- whom to ask -------------------------------------------------------------------------------------------


def firmware(root: Path, **said: str) -> None:
    place = root / "sys/class/dmi/id"
    place.mkdir(parents=True, exist_ok=True)
    for name, text in said.items():
        (place / name).write_text(text + "\n")


def kinds(wanted: list[str], root: Path, **environ: str) -> list[str]:
    return [type(source).__name__ for _, source, _ in which.sources(wanted, "node1", 4, environ, root)]


def test_auto_asks_the_cloud_that_has_made_the_machine_and_nobody_elsewhere(tmp_path: Path) -> None:
    assert kinds(["auto"], tmp_path) == []
    firmware(tmp_path, sys_vendor="QEMU", product_name="Standard PC")
    assert kinds(["auto"], tmp_path) == []
    firmware(tmp_path, sys_vendor="Xen", bios_version="4.11.amazon")
    assert kinds(["auto"], tmp_path) == ["Aws"]
    firmware(tmp_path, bios_version="", sys_vendor="Google", product_name="Google Compute Engine")
    assert kinds(["auto"], tmp_path) == ["Gcp", "Gcp"]
    firmware(tmp_path, sys_vendor="Microsoft Corporation", product_name="Virtual Machine")
    assert kinds(["auto"], tmp_path) == [], "Hyper-V is no cloud"
    firmware(tmp_path, chassis_asset_tag="7783-7084-3265-9085-8269-3286-77")
    assert kinds(["auto"], tmp_path) == ["Azure"]
    assert kinds(["auto", "azure", f"file:{tmp_path}"], tmp_path) == ["Azure", "File"]
    assert kinds(["none"], tmp_path) == []


def test_a_pod_without_an_account_hears_nothing_of_kubernetes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        kinds(["kubernetes"], tmp_path)


@pytest.mark.parametrize(
    "wrong", [["hetzner"], ["file:"], ["command:"], ["command:'"], ["none", "aws"], [""]]
)
def test_flags_that_are_none(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match="--ft-notices"):
        which.parse(wrong)


def test_flags() -> None:
    assert which.parse(["auto", "file:a/b", "command:echo x"]) == [
        "auto",
        f"file:{Path('a/b').absolute()}",
        "command:echo x",
    ]


# -- the watch ---------------------------------------------------------------------------------------------


def watched(wanted: list[str], until: Callable[[list[Noticed]], bool]) -> list[Noticed]:
    """What one node hears, until that is so."""
    heard: list[Noticed] = []

    async def serve() -> None:
        watching = watch.Watch("node1", heard.append)
        task = asyncio.create_task(watching.serve(wanted, 4))
        while not until(heard) and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(serve())
    return heard


def test_a_look_for_which_there_is_no_thread_is_one_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(File, "every", 0.01)
    (tmp_path / "a").write_text("node1 500 soon\n")
    refused, real = [1, 2], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ft-notices" and refused:
            refused.pop()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    [heard] = watched([f"file:{tmp_path / 'a'}"], lambda heard: bool(heard))
    assert heard.reason.endswith("soon") and not refused


def test_changes_are_heard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(File, "every", 0.01)
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("node1 500 later\n")

    def until(heard: list[Noticed]) -> bool:
        if len(heard) == 1:
            other.write_text("* 100 sooner\n")
        if len(heard) == 2:
            path.unlink(missing_ok=True)
            other.unlink(missing_ok=True)
        return bool(heard) and not heard[-1].reason

    heard = watched([f"file:{path}", f"file:{other}"], until)
    assert [each.reason.rpartition(" ")[2] for each in heard if "later" not in each.reason] == ["sooner", ""]
    assert heard[0].reason.endswith("later")
    assert all(each.seconds is not None and each.seconds > 50 for each in heard if each.reason)


def test_trouble_is_said_once_where_somebody_was_named_and_is_over_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = AwsService()
    service.action = SPOT
    for name, value in ("every", 0.01), ("_token", ""):
        monkeypatch.setattr(Aws, name, value, raising=False)
    monkeypatch.setattr(watch, "SELDOM", 0.01)
    with service.serving() as (host, port):
        monkeypatch.setenv(which.ADDRESS, f"{host}:{port}")
        service.trouble = lambda: (503, {}, b"")

        def until(heard: list[Noticed]) -> bool:
            if len(service.asked) > 3 * watch.PATIENCE:
                service.trouble = None
            return bool(heard)

        with caplog.at_level(logging.INFO):
            [notice] = watched(["aws"], until)
    assert notice.reason == "AWS, spot/instance-action: terminate"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "node node1: --ft-notices aws does not answer" in caplog.text


def test_who_was_named_and_cannot_be_asked_here_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert watched(["kubernetes"], lambda heard: False) == []
    assert "node node1 hears no notices: --ft-notices kubernetes" in caplog.text

"""What GPUs report, and what is done about it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import nvml_library
import pytest
from core.control.prestart.test_drain import start, stop
from core.control.test_controller_machine import ControlPlane, lose
from core.node.test_agent_machine import Node, plan
from harness import ROOT
from msgspec.structs import replace

import mkdocs_reference
from ft_core import plugins
from ft_core.control.events import Received
from ft_core.control.liveness.device_health import CONDITIONS, DRIVER_ADVICE, record
from ft_core.control.liveness.strikes import Strikes
from ft_core.control.liveness.xid_table import UNKNOWN, XIDS, Advice
from ft_core.node import events as e
from ft_core.node.devices import gpus, nvml, watch
from ft_core.node.devices.infiniband import Links
from ft_core.node.devices.xids import Xids
from ft_core.protocol import messages as m
from ft_core.protocol.messages import DeviceAction, Fault, Symptom, WorkerLost

NEWEST = 172
"""The last number of NVIDIA's catalogue."""
ADVISED = {
    Advice.RESTART_APP: (8, 11, 13, 31, 32, *range(39, 42), *range(69, 73), 94),
    Advice.RESET_GPU: (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 162),
    Advice.RESTART_BM: (79, 160),
    Advice.WORKFLOW: (45, 48, 74, *range(144, 151), 154),
    Advice.IGNORE: (43, 44, 63, 92, 93, 121, 137, 157),
}
"""What NVIDIA's monitor does."""


def test_every_xid_has_a_row() -> None:
    assert list(XIDS) == list(range(1, NEWEST + 1))
    assert UNKNOWN.action is DeviceAction.COUNT


@pytest.mark.parametrize("advice", ADVISED)
def test_the_advice_is_nvidias(advice: Advice) -> None:
    assert {number: XIDS[number].advice for number in ADVISED[advice]} == dict.fromkeys(
        ADVISED[advice], advice
    )


def test_who_does_not_follow_the_advice_says_why() -> None:
    """What has an advice has its action, or a reason; nothing is never done about what needs a reset."""
    usual = {row.advice: row.action for row in XIDS.values() if not row.why}
    assert set(usual) == set(Advice)
    for number, row in XIDS.items():
        assert row.why or row.action is usual[row.advice], number
        if row.advice in (Advice.RESET_GPU, Advice.RESTART_BM):
            assert row.action is not DeviceAction.NOTHING, number


def test_the_page_shows_each() -> None:
    page = (ROOT / "docs" / "device_health.md").read_text()
    shown = mkdocs_reference.on_page_markdown(page)
    xids, _, advice = shown.partition("| XID |")[2].partition("\n\n")
    rows = [re.split(r" \| ", line.strip("| ")) for line in xids.splitlines() if re.match(r"\| \d", line)]
    found = {int(number): row[1:4] for row in rows for number in row[0].split(", ")}
    assert found == {n: [row.what, row.advice, f"`{row.action}`"] for n, row in XIDS.items()}
    assert all(f"`{action}`" in shown for action in DeviceAction)
    assert all(f"| {n} | {row.what} | `{row.action}` |" in advice for n, row in DRIVER_ADVICE.items())


def training(nodes: int = 2, spares: int = 1, **settings: object) -> ControlPlane:
    job = ControlPlane(nodes=nodes, spares=spares, **settings)  # type: ignore[arg-type]
    job.all_step(1)
    return job


def fails(job: ControlPlane, role: int, fault: Fault = Fault.DEVICE, device: int = 0, step: int = 1) -> str:
    """The worker of a role does; where the role goes on."""
    agent = job[job.controller.cluster.places[role]]
    agent.say(WorkerLost(role, agent.workers.pop(role), "ended", 1, fault, step=step, device=device))
    job.all_report()
    assert job.phase == "running"
    return job.controller.cluster.places[role]


def test_a_device_that_has_failed_costs_one_recovery() -> None:
    """Its role does not come back to it, and nobody else gets it while there is another."""
    job = training(spares=2)
    assert fails(job, 1) == "node2"
    job.all_step(2)
    assert len(job.records_of("detected")) == 1
    assert fails(job, 0, Fault.NODE, step=2) == "node0", "another device's is as before"
    lose(job, "node0")
    job.all_report()
    assert job.controller.cluster.places == {0: "node3", 1: "node2"}, "node1 has no other device"


def test_where_there_is_no_other_device_it_is_used() -> None:
    job = training(spares=0)
    assert fails(job, 1) == "node1"


def test_what_fails_on_another_device_too_was_not_the_devices_fault() -> None:
    job = training()
    assert fails(job, 1) == "node2" and fails(job, 1) == "node2"
    assert job.controller.cluster.faulted(job.now) == {}


def test_of_a_node_with_several_the_others_are_used() -> None:
    job = training(nproc=2)
    assert fails(job, 3, device=1) == "node2", "role 2 has the other device of its node"
    job.all_step(2)
    assert fails(job, 2, Fault.KILLED, device=0, step=2) == "node1"
    job.all_step(3)
    lose(job, "node0")
    job.all_report()
    places = job.controller.cluster.places
    assert places[2] == "node1" and places[3] == "node2"
    assert sorted((places[0], places[1])) == ["node1", "node2"], "every device has its role, that one too"


def test_its_agent_has_another_device_for_its_role() -> None:
    node = Node(nproc_per_node=2)
    failed = m.FailureRecord("node0", 0, 0, 1, 4, Fault.DEVICE, "", 0.0)
    node.hear(m.KeepStrikes([failed, replace(failed, place="node1", device=1)]))
    node.hear(plan())
    [worker] = node.agent.crew.playing()
    assert worker.device == 1


def test_after_a_while_a_device_is_like_any_other() -> None:
    node = Node(nproc_per_node=2, strike_minutes=1)
    node.hear(m.KeepStrikes([m.FailureRecord("node0", 0, 0, 1, 4, Fault.DEVICE, "", 30.0)]))
    node.handle(e.Tick(), after=31.0)
    node.hear(plan())
    [worker] = node.agent.crew.playing()
    assert worker.device == 0


def xid(number: int, device: int = 0, age: float = 0.0) -> m.DeviceFinding:
    return m.DeviceFinding(Symptom.XID, number, device, "0000:3b:00", "as the driver says", age)


def standing(job: ControlPlane) -> tuple[int, set[str], dict[str, int], list[str]]:
    """What counts against node1; who is avoided, has a device that is, and is drained."""
    cluster, now = job.controller.cluster, job.now
    against = len(cluster.strikes.against("node1", now))
    return against, cluster.avoided(now), cluster.faulted(now), list(cluster.draining)


LEADS_TO = {
    DeviceAction.NOTHING: (0, set(), {}, []),
    DeviceAction.COUNT: (1, set(), {}, []),
    DeviceAction.ELSEWHERE: (0, set(), {"node1": 1}, []),
    DeviceAction.DRAIN: (0, set(), {"node1": 1}, ["node1"]),
    DeviceAction.CONDEMN: (1, {"node1"}, {"node1": 1}, ["node1"]),
}


@pytest.mark.parametrize("number", XIDS)
def test_every_xid_leads_to_its_action(number: int) -> None:
    """Its worker dies of it: the role goes on elsewhere at once, unless the device is as good as before."""
    job, action = training(), XIDS[number].action
    job["node1"].say(xid(number))
    assert standing(job) == LEADS_TO[action]
    events = job.records_of("device")
    assert [event.more["action"] for event in events] == [action] * (action is not DeviceAction.NOTHING)
    assert all(f"XID {number}, {XIDS[number].what}" in event.reason for event in events)
    home = action in (DeviceAction.NOTHING, DeviceAction.COUNT)
    assert fails(job, 1, Fault.KILLED) == ("node1" if home else "node2")
    assert len(job.records_of("detected")) == 1


@pytest.mark.parametrize("number", DRIVER_ADVICE)
def test_what_the_driver_advises_is_acted_on(number: int) -> None:
    job = training()
    job["node1"].say(replace(xid(number), symptom=Symptom.ADVICE))
    assert standing(job) == LEADS_TO[DRIVER_ADVICE[number].action]


def test_what_nobody_knows_counts() -> None:
    for finding in (xid(999), replace(xid(99), symptom=Symptom.ADVICE)):
        job = training()
        job["node1"].say(finding)
        assert standing(job) == LEADS_TO[DeviceAction.COUNT]


def test_a_node_whose_roles_live_is_drained_before_they_fail() -> None:
    """Its roles start elsewhere and change over between two steps; nothing is done again."""
    job = training()
    job["node1"].say(xid(64))
    job.wait(0.1)
    start(job, 1, on="node2")
    stop(job, 0, 1)
    job.all_report()
    assert job.controller.cluster.places == {0: "node0", 1: "node2"}
    assert job.records_of("moving") and not job.records_of("detected")
    [begun] = job.records_of("draining")
    assert begun.reason.startswith("device 0: XID 64")


def test_said_again_it_is_no_news() -> None:
    job = training(spares=0)
    for number in (79, 61):
        job["node1"].say(xid(number))
        job.wait(5.0)
        job["node1"].say(xid(number, age=5.0))
    assert len(job.records_of("device")) == 2 and standing(job)[0] == 2
    job["node1"].say(xid(61))
    assert len(job.records_of("device")) == 2, "a controller may get it twice over one connection"
    job.wait(61.0)
    job["node1"].say(xid(61))
    assert len(job.records_of("device")) == 3 and standing(job)[0] == 3, "it has come again"


def test_a_sick_node_without_roles_stays_for_want_of_another() -> None:
    """Every spare of a rack may be, for one switch."""
    job = training()
    job["node2"].say(xid(79))
    job.wait(5.0)
    assert job.controller.cluster.draining == [] and "node2" in job.controller.cluster.avoided(job.now)


def test_what_all_devices_warn_of_at_once_is_one_strike() -> None:
    job = training(spares=0, nproc=2)
    for device in range(2):
        job["node1"].say(xid(144, device=device))
    assert standing(job)[0] == 1
    job.wait(61.0)
    job["node1"].say(xid(144))
    assert standing(job)[0] == 2


def test_what_was_forgiven_while_its_agent_was_away_stays_so() -> None:
    job = training(spares=0)
    job["node1"].say(xid(79))
    job.wait(5.0)
    cluster = job.controller.cluster
    cluster.strikes.forgive("node1", job.now)
    job.wait(5.0)
    job["node1"].say(xid(79, age=10.0))
    assert standing(job) == LEADS_TO[DeviceAction.NOTHING] and len(job.records_of("device")) == 1
    job["node1"].say(xid(79))
    assert standing(job)[1] == {"node1"}, "that is another one"


def test_a_condemned_device_is_not_forgotten_for_what_others_say() -> None:
    strikes = Strikes(3, 3600.0)
    strikes.add(m.FailureRecord("node1", 0, -1, 0, -1, Fault.DEVICE_CONDEMNED, "xid 79", 0.0), 0.0)
    for number in range(1000):
        about = f"node{number}", 0, -1, 0, -1, Fault.DEVICE_WARNING, "xid 92", 0.0
        strikes.add(m.FailureRecord(*about), 1.0)
    assert strikes.avoided(2.0) == {"node1"} and len(strikes.value(2.0)) < 1000


def test_where_a_condemned_node_is_needed_it_goes_on() -> None:
    job = training(spares=0)
    job["node1"].say(xid(79))
    job.wait(1.0)
    assert "other nodes have workers for 0" in job.records_of("not_drained")[0].reason
    assert fails(job, 1) == "node1"
    [avoided] = job.records_of("avoided")
    assert "has a device (0) to be repaired, xid 79" in avoided.reason


def test_a_notice_that_is_taken_back_leaves_a_sick_device() -> None:
    job = training(spares=0)
    job["node1"].say(xid(79))
    job["node1"].say(m.Notice("maintenance", 30.0))
    job["node1"].say(m.Notice("", None))
    job.join("node9")
    job["node9"].beat()
    job.wait(1.1)
    assert job["node1"].draining


@pytest.mark.parametrize("noticed", [False, True])
def test_a_machine_that_is_forgiven_is_not_drained_for_its_devices(noticed: bool) -> None:
    job = training(spares=0)
    job["node1"].say(xid(79))
    if noticed:
        job["node1"].say(m.Notice("maintenance", None))
    job.happens(Received(99, m.Forgive("node1")))
    assert standing(job) == LEADS_TO[DeviceAction.NOTHING]
    job.join("node9")
    job["node9"].beat()
    job.wait(1.1)
    assert job["node1"].draining is noticed


def test_a_successor_knows_of_it() -> None:
    job = training()
    job["node1"].say(xid(94))
    job.wait(0.1)
    [kept] = [each for each in job["node0"].heard if isinstance(each, m.KeepStrikes)][-1:]
    assert [(s.place, s.device, s.signature) for s in kept.strikes] == [("node1", 0, "xid 94")]


def test_an_agent_says_it_once_and_to_each_controller_until_it_is_forgiven() -> None:
    node = Node()
    node.handle(e.DeviceFound(xid(79)))
    assert node.said(m.DeviceFinding) == [xid(79)]
    node.handle(e.DeviceFound(xid(79)), after=1.0)
    assert not node.said(m.DeviceFinding), "a driver may say the same a thousand times"
    node.handle(e.DeviceFound(xid(79, device=1)))
    assert node.said(m.DeviceFinding)

    def again(after: float) -> list[tuple[int, float]]:
        node.now += after
        node.greeting()
        return [(finding.device, finding.age) for finding in node.said(m.DeviceFinding)]

    assert again(9.0) == [(0, 10.0), (1, 9.0)]
    counted = record(xid(79), "node0", DeviceAction.CONDEMN)
    node.hear(m.KeepStrikes([counted]))
    assert again(0.0) == [(0, 10.0), (1, 9.0)]
    node.hear(m.KeepStrikes([]))
    assert again(0.0) == [(1, 9.0)], "nobody has counted the other yet"
    assert again(3600.0) == []
    node.handle(e.DeviceFound(xid(79)))
    assert node.said(m.DeviceFinding), "it has come again"


async def a_while(looks: watch.DeviceWatch, devices: int) -> None:
    """It serves until it knows which GPUs are its own."""
    serving = asyncio.create_task(looks.serve(devices, every=60.0))
    while looks._ours is None:
        await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def log_line(number: int, bus: str = "0000:3b:00", text: str = "pid=1, it is broken") -> str:
    return f"4,1,1,-;NVRM: Xid (PCI:{bus}): {number}, {text}\n"


def listed(root: Path, *gpus: str) -> str:
    """As the driver lists the machine's GPUs."""
    for bus in gpus:
        (root / f"{bus}.0").mkdir(parents=True)
        (root / f"{bus}.0" / "information").write_text(f"Model: \t\t X\nGPU UUID: \t GPU-{bus[5:7]}-1\n")
    return str(root)


@pytest.mark.parametrize(
    ("visible", "devices", "found"),
    [
        (None, 2, {"0000:1b:00": 0, "0000:3b:00": 1}),
        ("2,0", 2, {"0000:5d:00": 0, "0000:1b:00": 1}),
        ("GPU-5d, GPU-3b-1", 2, {"0000:5d:00": 0, "0000:3b:00": 1}),
        ("1", 1, {"0000:3b:00": 0}),
        ("7", 1, None),
        ("MIG-5d", 1, None),
        ("GPU-", 1, None),
        ("", 1, {}),
        ("-1", 1, {}),
    ],
)
def test_which_gpus_are_the_jobs(
    visible: str | None, devices: int, found: dict[str, int] | None, tmp_path: Path
) -> None:
    gpus_here = listed(tmp_path / "gpus", "0000:3b:00", "0000:1b:00", "0000:5d:00")
    assert gpus.by_bus(devices, visible, gpus_here) == found
    assert gpus.by_bus(devices, visible, str(tmp_path / "none")) == (found if found == {} else None)


def test_gpus_that_are_kept_for_others_are_not_the_jobs(tmp_path: Path) -> None:
    """As CUDA numbers them in a container, and in a job of Slurm's that has some of a machine's GPUs."""
    gpus_here = listed(tmp_path / "gpus", "0000:1b:00", "0000:3b:00", "0000:5d:00")
    for minor, bus in ((2, "0000:1b:00"), (0, "0000:3b:00"), (1, "0000:5d:00")):
        with (tmp_path / "gpus" / f"{bus}.0" / "information").open("a") as file:
            file.write(f"Device Minor: \t {minor}\n")
    for minor in (0, 1):
        (tmp_path / f"nvidia{minor}").touch()
    found = gpus.by_bus(2, "0,1", gpus_here, str(tmp_path / "nvidia"))
    assert found == {"0000:3b:00": 0, "0000:5d:00": 1}


def test_what_the_kernel_log_says_becomes_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the job's own GPUs; of all, where it is not known which are."""
    log = tmp_path / "kmsg"
    log.write_text(log_line(48, text="before"))
    found: list[m.DeviceFinding] = []
    looks = watch.DeviceWatch(Xids(str(log)), lambda event: found.append(event.finding))
    looks.look()
    with log.open("a") as file:
        file.write(log_line(79))
    looks.look()
    assert not found, "it may be another job's"
    looks._looked = True
    looks.look()
    assert found == [m.DeviceFinding(Symptom.XID, 79, -1, "0000:3b:00", "pid=1, it is broken")]
    machine = listed(tmp_path / "gpus", "0000:1b:00", "0000:3b:00", "0000:5d:00")
    monkeypatch.setattr(gpus.by_bus, "__defaults__", (machine, "/dev/nvidia"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    asyncio.run(a_while(looks, 2))
    advice = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    with log.open("a") as file:
        file.write(log_line(13) + log_line(13, "0000:1b:00") + log_line(154, "0000:5D:00", advice))
        file.write(log_line(154, text="in other words") + "4,1,1,-;NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 31\n")
    found.clear()
    looks.look()
    assert [(each.signature, each.device) for each in found] == [
        *(("xid 13", 0), ("driver advice 2", 1), ("xid 154", 0), ("xid 31", 0))
    ]
    found.clear()
    looks.look()
    assert not found


LOOKS = """
import json, sys
from pathlib import Path
from ft_core.node.devices import nvml
from nvml_library import say
state, places, changes = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
say(state, **changes[0])
library = nvml.opened(places)
for change in changes:
    say(state, **change)
    found = library.look() if library else None
    print(json.dumps(found and [[str(each.symptom), each.number, each.device, each.bus] for each in found]))
"""


def nvml_says(tmp_path: Path, *changes: dict[str, int], places: object = None) -> list[object]:
    """What is found of each state that NVML has one after the other."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    directory, state = nvml_library.build(tmp_path / "lib"), tmp_path / "state"
    environment = os.environ | {"LD_LIBRARY_PATH": str(directory), "FAKE_NVML": str(state)}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    command = [sys.executable, "-c", LOOKS, str(state), json.dumps(places), json.dumps(changes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@nvml_library.needs_cc
def test_what_nvml_says_of_a_gpu_is_told_when_it_changes(tmp_path: Path) -> None:
    ours = {"0000:1b:00": 1, "0000:2b:00": 0}
    two = {"gpus": 3, "uncorrected0": 4, "pending1": 1, "uncorrected2": 9}
    found = nvml_says(
        tmp_path,
        two,
        two | {"uncorrected0": 6, "uncorrected2": 10},
        two | {"uncorrected0": 6, "pending0": 1, "retiring1": 1},
        two | {"uncorrected0": 6, "pending0": 1, "retiring1": 1, "failed0": 1, "advice1": 2},
        two | {"uncorrected0": 6, "pending0": 1, "retiring1": 1, "failed0": 1, "lost1": 1, "old0": 1},
        two | {"uncorrected0": 6, "xid0": 2, "xid_number0": 79, "xid1": 1, "xid_number1": 154, "lost1": 1},
        places=ours,
    )
    assert found == [
        [],
        [["uncorrected memory errors", 0, 1, "0000:1b:00"]],
        [["remapping pending", 0, 1, "0000:1b:00"], ["page retirement pending", 0, 0, "0000:2b:00"]],
        [["remapping failed", 0, 1, "0000:1b:00"], ["driver advice", 2, 0, "0000:2b:00"]],
        [["lost", 0, 0, "0000:2b:00"]],
        [["xid", 79, 1, "0000:1b:00"]] * 2,  # what it does not say for a while has not grown by that
    ]


@nvml_library.needs_cc
def test_what_cannot_be_lived_with_is_told_at_once(tmp_path: Path) -> None:
    """Also where it was so before the job; where it is not known which GPUs are whose, it is the node's."""
    [found] = nvml_says(tmp_path, {"gpus": 1, "failed0": 1, "advice0": 1, "uncorrected0": 7, "pending0": 1})
    assert found == [["remapping failed", 0, -1, "0000:1b:00"], ["driver advice", 1, -1, "0000:1b:00"]]
    assert nvml_says(tmp_path, {"gpus": 0}) == [None], "there is no driver"


def test_a_machine_without_nvml_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.opened(None) is None


def test_nvml_of_another_version_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(_: object) -> None:
        raise AttributeError("module 'pynvml' has no attribute 'nvmlEventSetWait_v2'")

    monkeypatch.setattr(nvml, "opened", opened)
    monkeypatch.setattr(plugins, "load", lambda _: [])
    hears(lambda _: "nvmlEventSetWait_v2" in caplog.text)


def test_a_driver_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel's log says is heard meanwhile, and the watch can be ended."""
    log, answers, asked = tmp_path / "kmsg", threading.Event(), threading.Event()
    log.touch()

    def opened(places: object) -> None:
        asked.set()
        answers.wait(60)

    monkeypatch.setattr(watch.nvml, "opened", opened)
    found: list[m.DeviceFinding] = []
    looks = watch.DeviceWatch(Xids(str(log)), lambda event: found.append(event.finding))

    async def serve() -> None:
        serving = asyncio.create_task(looks.serve(1, every=0.0))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        log.write_text(log_line(79))
        looks.look()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(serve())
    assert not answers.is_set() and [each.number for each in found] == [79]
    answers.set()


@pytest.mark.parametrize("symptom", CONDITIONS)
def test_what_nvml_says_leads_to_its_action(symptom: Symptom) -> None:
    job = training()
    job["node1"].say(replace(xid(0), symptom=symptom))
    assert standing(job) == LEADS_TO[CONDITIONS[symptom].action]


PLUGIN = """
from ft_core.node.devices.health import Condition
from ft_core.protocol.messages import DeviceAction
CALLS = []
SAYS = [[], ["a"], ["a", "b"], ["b"], ["a"]]
def healthy():
    CALLS.append(1)
    for name in SAYS[min(len(CALLS), len(SAYS)) - 1]:
        yield Condition(f"link {name}", DeviceAction.DRAIN, 1, "it is down")
def broken(): raise OSError("no such tool")
def no_answer(): return ["down"]
"""


def installed(directory: Path, monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """A package with these entry points."""
    about = directory / "health_plugin-1.dist-info"
    about.mkdir()
    (directory / "health_plugin.py").write_text(PLUGIN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: health-plugin\nVersion: 1\n")
    lines = [f"{name} = health_plugin:{function}" for name, function in entries.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{plugins.HEALTH}]", *lines]))
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "health_plugin", raising=False)
    monkeypatch.setattr(plugins, "load", plugins.load.__wrapped__)  # what others have is kept
    monkeypatch.setitem(sys.modules, "pynvml", None)


def hears(until: Callable[[list[m.DeviceFinding]], bool]) -> list[m.DeviceFinding]:
    """The findings of a watch."""
    found: list[m.DeviceFinding] = []

    async def serve() -> None:
        looks = watch.DeviceWatch(Xids("/nowhere"), lambda event: found.append(event.finding))
        serving = asyncio.create_task(looks.serve(1, every=0.01))
        while not until(found):
            assert not serving.done()
            await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(serve())
    return found


def test_a_plugin_is_asked_and_a_condition_told_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails keeps nobody from being asked."""
    installed(tmp_path, monkeypatch, a="broken", b="no_answer", c="healthy")
    found = hears(lambda found: len(found) == 3)
    assert [(each.signature, each.device) for each in found] == [
        *(("health link a", 1), ("health link b", 1), ("health link a", 1))
    ]
    assert {(each.symptom, each.action, each.text) for each in found} == {
        (Symptom.OTHER, DeviceAction.DRAIN, "it is down")
    }
    assert "health_plugin.broken has failed, and is not asked for health any more" in caplog.text
    assert (
        "health_plugin.no_answer has failed" in caplog.text and "'down', which is no Condition" in caplog.text
    )


def test_a_look_for_which_there_is_no_thread_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever it is: of all that are to be started, each second one is."""
    installed(tmp_path, monkeypatch, c="healthy")
    starts, real = itertools.count(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ft-notices" and next(starts) % 2 == 0:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert len(hears(lambda found: len(found) == 3)) == 3
    assert not caplog.text and next(starts) > 4


def test_a_plugin_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(tmp_path, monkeypatch, a="nothing_of_the_kind")
    assert hears(lambda _: "no plugin for health is asked" in caplog.text) == []


@pytest.mark.parametrize("action", DeviceAction)
def test_what_a_plugin_wants_is_done(action: DeviceAction) -> None:
    job = training()
    job["node1"].say(m.DeviceFinding(Symptom.OTHER, 0, 0, "", "it is down", name="link a", action=action))
    assert standing(job) == LEADS_TO[action]
    assert all("link a (it is down)" in event.reason for event in job.records_of("device"))


def test_a_port_that_loses_its_link(tmp_path: Path) -> None:
    """One that never had one is not in use; one that has it again counts."""

    def port(name: str, state: str, lost: int) -> None:
        at = tmp_path / name / "ports" / "1"
        (at / "counters").mkdir(parents=True, exist_ok=True)
        (at / "state").write_text(f"{state}\n")
        (at / "counters" / "link_downed").write_text(f"{lost}\n")

    def looks() -> list[tuple[str, DeviceAction]]:
        return [(each.name, each.action) for each in links()]

    links = Links(str(tmp_path))
    assert looks() == []
    port("mlx5_0", "4: ACTIVE", 3)
    port("mlx5_1", "1: DOWN", 0)
    assert looks() == looks() == looks() == []
    port("mlx5_0", "2: INIT", 4)
    was, down = (
        ("link of mlx5_0:1 was lost", DeviceAction.COUNT),
        ("link of mlx5_0:1 is down", DeviceAction.COUNT),
    )
    assert looks() == [was]
    assert looks() == [down] == looks()
    port("mlx5_0", "4: ACTIVE", 4)
    assert looks() == []
    port("mlx5_0", "4: ACTIVE", 5)
    assert looks() == [was] and looks() == []
    (tmp_path / "mlx5_0/ports/1/counters/link_downed").unlink()
    assert looks() == []

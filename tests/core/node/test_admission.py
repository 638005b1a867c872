"""Nobody joins unchecked: the checks of a node, the process that makes them, and what they lead to."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from core.control.test_controller_machine import ControlPlane, lose, restart, tell
from core.node.test_agent_machine import Node
from xxhash import xxh3_64_hexdigest

from ft_core.cli.doctor import command
from ft_core.control.admission import PATIENCE
from ft_core.control.decisions import SPARES_COME
from ft_core.control.liveness import outliers
from ft_core.node import events as e
from ft_core.node.admission import child, examination, known_answer, limits, speed
from ft_core.node.admission.checked import findings
from ft_core.node.admission.findings import fail, warn
from ft_core.protocol import messages as m
from ft_core.protocol.messages import DeviceAction, NodeCheck, Soundness, Symptom, Timing
from ft_core.settings import ANY_RANK

SUBJECT = examination.Subject("127.0.0.1", 1, 2, {})
SICK = NodeCheck("computation", Soundness.SICK, "2 cores", "core 1 computes wrongly: the product")
SIZES = {"float32": 1 << 24, "bfloat16": 1 << 8}
"""Up to which integers are exact."""


# -- a computation whose answer is known ---------------------------------------------------------------


def bits(values: np.ndarray, dtype: str) -> bytes:
    exact = np.ascontiguousarray(values.astype(np.float32))
    if dtype == "float32":
        return exact.tobytes()
    assert not (exact.view(np.uint32) & 0xFFFF).any(), "it is no bfloat16"
    return (exact.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("problem", known_answer.ANSWERS, ids=str)
def test_the_answers_are_those_of_whole_numbers(problem: known_answer.Problem) -> None:
    """By another road: int64. And no sum on the way is one that the type does not hold."""

    def factor(rows: int, columns: int, salt: int) -> np.ndarray:
        down, along = np.arange(rows)[:, None], np.arange(columns)[None, :]
        return (((down * 73856093) ^ (along * 19349663) ^ salt) >> 7) % (2 * problem.top + 1) - problem.top

    one, other = factor(problem.rows, problem.inner, 1), factor(problem.inner, problem.columns, 83492791)
    sums = one.sum(axis=1)
    running = sums.cumsum()
    assert problem.inner * problem.top**2 <= SIZES[problem.dtype]
    assert 2 * abs(running).max() < SIZES["float32"]
    product = one.astype(np.float64) @ other.astype(np.float64)  # exact, and quicker than integers
    found = (product, problem.dtype), (sums, problem.dtype), (running, "float32")
    assert tuple(xxh3_64_hexdigest(bits(*each)) for each in found) == known_answer.ANSWERS[problem]


def test_this_machine_comes_to_them() -> None:
    [check] = known_answer.on_cores()
    assert check.soundness is Soundness.OK and " cores, 3 problems" in check.found


def computes_wrongly(monkeypatch: pytest.MonkeyPatch, core: int | None = None) -> None:
    """One bit of a product, on one core or on all."""
    right = known_answer.solved

    def solved(problem: known_answer.Problem, device: str) -> tuple[str, str, str]:
        product, *sums = right(problem, "cpu")
        if core is None or os.sched_getaffinity(0) == {core}:
            product = f"{int(product, 16) ^ 1:016x}"
        return product, *sums  # type: ignore[return-value]

    monkeypatch.setattr(known_answer, "solved", solved)


def test_a_core_that_computes_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    computes_wrongly(monkeypatch, core)
    [check] = known_answer.on_cores()
    assert check.soundness is Soundness.SICK
    assert f"core {core} computes wrongly" in check.why and "product" in check.why
    assert os.sched_getaffinity(0) == before


def test_a_gpu_that_computes_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_answer, "LARGE", ())
    computes_wrongly(monkeypatch)
    [check] = known_answer.on_gpu(3)
    assert (check.soundness, check.device) == (Soundness.SICK, 3)
    assert check.why.startswith("GPU 3 computes wrongly")


@pytest.mark.parametrize(
    "error, sick", [("CUDA error: unspecified launch failure", True), ("out of memory", False)]
)
def test_a_gpu_that_fails_is_sick_and_one_that_is_full_is_not(
    monkeypatch: pytest.MonkeyPatch, error: str, sick: bool
) -> None:
    def solved(*_: object) -> tuple[str, str, str]:
        raise RuntimeError(error)

    monkeypatch.setattr(known_answer, "solved", solved)
    if not sick:
        with pytest.raises(RuntimeError):
            list(known_answer.on_gpu(0))
        return
    [check] = known_answer.on_gpu(0)
    assert check.soundness is Soundness.SICK and "launch failure" in check.why


# -- the others ----------------------------------------------------------------------------------------


def test_what_is_measured() -> None:
    found = {each.name: each for each in speed.of_host()}
    assert found.keys() == {"matmul", "memory"}
    assert all(0 < each.timing.best <= each.timing.worst for each in found.values())
    [check] = speed.loopback("127.0.0.1")
    assert check.soundness is Soundness.OK and "GB/s" in check.found
    assert speed.hardware(0)


def test_a_loopback_that_changes_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = iter((1, 2))
    monkeypatch.setattr(speed, "xxh3_64_intdigest", lambda _: next(sums))
    [check] = speed.loopback("127.0.0.1")
    assert check.soundness is Soundness.SICK


def test_an_address_that_is_not_here_is_unknown() -> None:
    with pytest.raises(OSError):
        list(speed.loopback("192.0.2.1"))


def test_settings_that_all_nodes_may_have_keep_nobody_out() -> None:
    bad = examination.of_doctor(fail("open files", "12", "allow more"))
    assert (bad.soundness, bad.why) == (Soundness.UNKNOWN, "open files: 12; allow more")
    assert examination.of_doctor(warn("open files", "1024", "allow more")).soundness is Soundness.OK


def test_what_devices_report() -> None:
    lost = m.DeviceFinding(Symptom.LOST, 0, 1, "0000:3b:00", "")
    ignored = m.DeviceFinding(Symptom.XID, 43, 0, "0000:3b:00", "")
    reported = list(examination.of_devices([lost, ignored]))
    assert reported[:2] == [lost, ignored]
    [check] = [each for each in reported if isinstance(each, NodeCheck)]
    assert (check.soundness, check.device) == (Soundness.SICK, 1)
    assert findings([check], [lost, ignored]) == [lost, ignored], "its action is that of its own table"
    [own] = findings([SICK], [])
    assert (own.symptom, own.action, own.text) == (Symptom.OTHER, DeviceAction.CONDEMN, SICK.why)


# -- all of them, in a process of its own --------------------------------------------------------------


def examined(monkeypatch: pytest.MonkeyPatch) -> examination.Examination:
    found = examination.Examination()
    examination.examine(SUBJECT, lambda line: examination.add(found, line))
    return found


def test_a_check_that_cannot_be_made_is_unknown_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_: str) -> None:
        raise OSError("no such address")

    monkeypatch.setattr(speed, "loopback", none)
    found = examined(monkeypatch)
    assert found.complete and found.hardware
    by_name = {check.name: check.soundness for check in found.checks}
    assert by_name.pop("loopback") is Soundness.UNKNOWN
    assert set(by_name.values()) == {Soundness.OK}
    assert {"computation", "shared memory", "open files", "matmul", "device health"} <= by_name.keys()
    assert found.times.keys() == {"matmul", "memory"}


def test_a_machine_that_no_recovery_works_on_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (512, 512))  # type: ignore[attr-defined]
    bad = [check for check in examined(monkeypatch).checks if check.soundness is Soundness.UNKNOWN]
    assert "open files" in {check.name for check in bad}


def in_a_process(
    path: Path, target: object, *arguments: object, limit: float = 60.0
) -> examination.Examination:
    context = multiprocessing.get_context("spawn")

    def start() -> multiprocessing.process.BaseProcess:
        process = context.Process(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        process.start()
        return process

    return asyncio.run(child.examined(start, path, limit))


def test_what_a_process_finds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "found"
    found = in_a_process(path, examination.main, str(path), SUBJECT)
    assert found.complete and all(check.soundness is not Soundness.UNKNOWN for check in found.checks)


def test_a_check_that_hangs_is_unknown_and_ended(tmp_path: Path) -> None:
    """What was found before counts."""
    path = tmp_path / "found"
    lines = examination.Line(check=SICK), examination.Line(begun="loopback")
    path.write_bytes(b"".join(examination.msgspec.json.encode(line) + b"\n" for line in lines) + b'{"begu')
    found = in_a_process(path, time.sleep, 600, limit=0.5)
    assert found.checks[0] == SICK
    [_, unknown] = found.checks
    assert (unknown.name, unknown.soundness) == ("loopback", Soundness.UNKNOWN)
    assert "did not end within 0.5 s" in unknown.why
    assert not multiprocessing.active_children() or all(
        p.join(10) is None for p in multiprocessing.active_children()
    )


def test_a_check_that_is_killed_is_unknown(tmp_path: Path) -> None:
    found = in_a_process(tmp_path / "found", os.abort)
    [unknown] = found.checks
    assert unknown.soundness is Soundness.UNKNOWN and "-6" in unknown.why


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: bool
) -> None:
    if wrong:
        computes_wrongly(monkeypatch)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.main(parser.parse_args(["--node"])) == int(wrong)
    said = capsys.readouterr().out
    assert ("SICK  computation" in said) is wrong and "GFLOP/s" in said
    assert command.main(parser.parse_args(["--node", "--json"])) == int(wrong)
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks[0]["soundness"] == ("sick" if wrong else "ok")


# -- the agent -----------------------------------------------------------------------------------------


def test_an_agent_is_asked(tmp_path: Path) -> None:
    node = Node()
    node.hear(m.CheckNode())
    assert node.effects(e.ExamineNode)
    node.hear(m.CheckNode())
    assert not node.done, "it is under way"
    times = {"matmul": Timing(0.1, 0.2)}
    node.handle(e.NodeExamined((SICK,), times, "a processor", ()))
    finding, answer = (each.message for each in node.effects(e.ToController))
    assert isinstance(finding, m.DeviceFinding) and finding.text == SICK.why
    assert answer == m.NodeChecked([SICK], times, "a processor")
    node.now += 5.0
    node.hear(m.CheckNode())
    [again] = node.said(m.NodeChecked)
    assert again.age == 5.0 and again.checks == [SICK]
    assert not node.said(m.DeviceFinding)
    node.hear(m.CheckNode(again=True))
    assert node.effects(e.ExamineNode) and not node.said(m.NodeChecked)


def test_another_controller_is_told() -> None:
    node = Node()
    node.hear(m.CheckNode())
    node.handle(e.NotConnected("it is gone"))
    node.handle(e.NodeExamined((SICK,), {}, "", ()))
    node.handle(e.Connected())
    assert [finding.text for finding in node.said(m.DeviceFinding)] == [SICK.why]
    node.hear(m.CheckNode())
    assert node.said(m.NodeChecked)


# -- the controller ------------------------------------------------------------------------------------


def job(**more: object) -> ControlPlane:
    about = {"nodes": 2, "spares": 0, "preflight": "joining"} | more
    found = ControlPlane(**about)  # type: ignore[arg-type]
    found.all_step(1)
    return found


def asked(job: ControlPlane, name: str) -> list[m.CheckNode]:
    return [each for each in job[name].heard if isinstance(each, m.CheckNode)]


def well(job: ControlPlane, *names: str, **times: Timing) -> None:
    for name in names:
        job[name].say(m.NodeChecked([NodeCheck("computation", Soundness.OK, "")], times, "a processor"))


def ill(job: ControlPlane, name: str) -> None:
    for finding in findings([SICK], []):
        job[name].say(finding)
    job[name].say(m.NodeChecked([SICK], {}, "a processor"))


def found(job: ControlPlane) -> list[tuple[str, str]]:
    return [(record.more["node"], record.more["found"]) for record in job.records_of("checked")]


def test_who_begins_with_the_job_is_not_asked_and_spares_are() -> None:
    control = job(spares=1)
    control.wait(0.1)
    assert [asked(control, name) for name in ("node0", "node1", "node2")] == [[], [], [m.CheckNode()]]
    assert not asked(job(spares=1, preflight="off"), "node2")


def test_who_joins_is_given_no_role_before_its_check_is_over() -> None:
    control = job(policy="stop")
    control.join("new")
    lose(control, "node1")
    control.all_report()
    control.wait(1.0)
    assert control.phase == "waiting" and control.done is None, "there will be a node, or not"
    well(control, "new")
    assert control.phase == "running" and control.controller.cluster.places[1] == "new"
    assert found(control) == [("new", "ok")] and not control.records_of("used_in_need")


def test_a_sick_node_is_not_used_while_there_is_another() -> None:
    control = job()
    control.join("a")
    control.join("b")
    ill(control, "a")
    well(control, "b")
    assert found(control) == [("a", "sick"), ("b", "ok")]
    [device] = control.records_of("device")
    assert "core 1 computes wrongly" in device.reason and device.more["action"] == "condemn"
    assert control.records_of("avoided")[0].more["node"] == "a"
    lose(control, "node1")
    control.all_report()
    assert control.controller.cluster.places[1] == "b"
    control.all_step(2)
    lose(control, "node0")
    control.all_report()
    assert control.controller.cluster.places[0] == "a"
    [used] = control.records_of("used_in_need")
    assert used.more["node"] == "a" and used.roles == (0,)


def test_a_check_without_an_answer_keeps_nobody_out() -> None:
    control = job()
    control.join("new")
    control.wait(PATIENCE - 1.0)
    assert not found(control)
    control.wait(2.0)
    assert found(control) == [("new", "unknown")]
    lose(control, "node1")
    control.all_report()
    assert control.controller.cluster.places[1] == "new"
    well(control, "new")
    assert len(found(control)) == 1, "it is too late"


def test_a_connection_that_breaks_loses_no_question() -> None:
    control = job()
    control.join("new")
    control["new"].hangs_up()
    control["new"].greet()
    assert len(asked(control, "new")) == 2
    well(control, "new")
    assert found(control) == [("new", "ok")]


def test_a_successor_asks_spares() -> None:
    control = job(spares=1)
    control.wait(0.1)
    well(control, "node2")
    restart(control, "node0", "node1", "node2")
    control.wait(0.1)
    tell(control)
    control.wait(0.2)
    assert len(asked(control, "node2")) == 2 and not asked(control, "node0")
    lose(control, "node1")
    control.all_report()
    assert control.phase != "running", "it may be sick"
    well(control, "node2")
    assert control.phase == "running" and control.controller.cluster.places[1] == "node2"


def test_who_is_far_slower_than_its_like_twice_is_sick() -> None:
    control = job(spares=3)
    control.wait(0.1)
    well(control, "node2", "node3", "node4", matmul=Timing(1.0, 1.2))
    control.join("slow")
    well(control, "slow", matmul=Timing(5.0, 6.0))
    assert asked(control, "slow")[1:] == [m.CheckNode(again=True)] and len(found(control)) == 3
    well(control, "slow", matmul=Timing(1.1, 6.0))
    assert found(control)[-1] == ("slow", "ok"), "that was chance"
    control.join("slower")
    for _ in range(2):
        well(control, "slower", matmul=Timing(5.0, 6.0))
    assert found(control)[-1] == ("slower", "sick")
    assert "matmul takes 4.2 times as long" in control.records_of("checked")[-1].reason
    assert control.controller.cluster.avoided(control.now) == {"slower"}


def test_only_gross_outliers_stand_out() -> None:
    others = [{"matmul": Timing(1.0, worst)} for worst in (1.0, 1.0, 1.5)]
    assert outliers.slower({"matmul": Timing(3.1, 9.0)}, others) == {"matmul": 3.1}
    assert not outliers.slower({"matmul": Timing(3.0, 9.0)}, others)
    assert not outliers.slower({"matmul": Timing(9.0, 9.0)}, others[:2]), "of two nobody knows which is slow"
    noisy = [{"matmul": Timing(1.0, worst)} for worst in (1.0, 4.0, 5.0)]
    assert not outliers.slower({"matmul": Timing(9.0, 9.0)}, noisy)
    assert not outliers.slower({"memory": Timing(9.0, 9.0)}, others)


# -- before the first step -----------------------------------------------------------------------------


def test_a_job_begins_once_all_are_checked() -> None:
    control = ControlPlane(nodes=2, spares=1, preflight="all")
    control.wait(1.0)
    assert control.phase == "forming"
    well(control, "node0", "node1")
    control.wait(0.1)
    assert control.phase == "running" and control["node1"].workers.keys() == {1}


def test_a_sick_node_is_left_out_where_there_is_a_spare() -> None:
    control = ControlPlane(nodes=2, spares=1, preflight="all")
    ill(control, "node0")
    well(control, "node1", "node2")
    control.wait(0.1)
    assert control.phase == "running" and control.controller.cluster.places == {0: "node2", 1: "node1"}


def test_a_spare_takes_the_place_of_a_sick_node_without_a_rank() -> None:
    control = ControlPlane(nodes=2, join=(), preflight="all")
    for name in ("a", "b"):
        control.join(name, ANY_RANK)
    control.join("spare")
    ill(control, "a")
    well(control, "b", "spare")
    control.wait(0.1)
    assert control.phase == "running" and set(control.controller.cluster.places.values()) == {"b", "spare"}


def test_without_a_spare_the_job_ends_and_says_which_node_is_sick() -> None:
    control = ControlPlane(nodes=2, spares=1, preflight="all")
    ill(control, "node0")
    ill(control, "node2")
    well(control, "node1")
    control.wait(SPARES_COME - 1.0)
    assert control.done is None, "another may come yet"
    control.wait(2.0)
    assert control.done is not None and control.done.code == 1
    [stopped] = control.records_of("stopped")
    assert "node node0 is sick: core 1 computes wrongly" in stopped.reason and "node2" in stopped.reason
    assert not control.records_of("decided")


def test_a_check_that_says_nothing_lets_the_job_begin() -> None:
    control = ControlPlane(nodes=2, preflight="all")
    well(control, "node0")
    control.wait(PATIENCE + 0.2)
    assert control.phase == "running" and ("node1", "unknown") in found(control)

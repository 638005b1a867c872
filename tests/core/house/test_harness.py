"""What the tests of whole jobs rely on, where it could be wrong unnoticed."""

from __future__ import annotations

import ports
import pytest
from harness import Layout, Result, check_clean, check_drills, check_finite, forks, read_losses


def test_a_step_that_is_logged_twice_is_seen_twice() -> None:
    text = "iteration 1/2 | loss 3.5 | lr 1\niteration 2/2 | loss 3\niteration 1/2 | loss 3.5\n"
    assert read_losses(text) == {1: ["3.5", "3.5"], 2: ["3"]}


def test_no_port_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    first, real = ports.free_port(), ports._dice.randrange
    draws = [first, first]
    monkeypatch.setattr(ports._dice, "randrange", lambda *about: draws.pop() if draws else real(*about))
    assert ports.free_port() != first and not draws


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_none(loss: str) -> None:
    with pytest.raises(AssertionError, match=loss):
        check_finite(["3.5", loss])
    with pytest.raises(AssertionError, match=loss):
        Result(0, "", {1: ["3.5"], 2: [loss]}, None)


def test_a_job_that_nobody_joined_is_not_clean() -> None:
    with pytest.raises(AssertionError, match="no node has ever joined"):
        check_clean(Result(0, "", {}, None))


def test_a_failure_without_recovery_is_seen(tmp_path) -> None:
    def result(*roles: int) -> Result:
        decided = [{"event": "decided", "epoch": epoch, "roles": [r]} for epoch, r in enumerate(roles, 2)]
        return Result(0, "", {}, None, decided, tmp_path)

    drills = ("0@forward:2", "1@backward:4", "0@gather:6:worker")
    with pytest.raises(AssertionError, match="not every failure happened"):
        check_drills(result(0, 1, 0), drills)
    for number in range(len(drills)):
        (tmp_path / f"injected-{number}").touch()
    check_drills(result(0, 1, 0), drills)
    with pytest.raises(AssertionError, match=r"no recovery of roles \{0: 2\}"):
        check_drills(result(1, 1, 1), drills)


def test_references_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = forks(Layout(1, 1, 2))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert forks(Layout(2, 2, 1)) is first

"""A newcomer's script that is interrupted on its way: the engine, the session and the state are stand-ins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ft_deepspeed.catch_up import CatchUp
from ft_deepspeed.newcomer import Newcomer
from ft_deepspeed.results import Results
from ft_deepspeed.script import Script


def test_how_far_it_is_is_said_after_a_while_and_then_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    catch_up = CatchUp(100)
    catch_up.until, said = 1100, []
    for position in range(101, 1100):
        now += 0.0625
        if (text := catch_up.progress(position)) is not None:
            said.append((position, text))
    catch_up.close()
    assert [position for position, _ in said] == [180, 260, 420, 740]
    assert "(80 of 1000 in 5 s, some 58 s more)" in said[0][1]
    assert "(640 of 1000 in 40 s, some 22 s more)" in said[3][1]


def ignored(_: Any) -> None:
    pass


class Adapter:
    """With counters that a restore replaces."""

    def __init__(self) -> None:
        self.at = "where the script is"
        self.loaded = {"results": Results().state(), "draws": None}

    def stepped(self) -> list[Any]:
        return []

    def results(self) -> Results:
        return Results()

    def envelope(self) -> Any:
        return {"at": self.at}

    def settle(self, envelope: Any) -> None:
        self.at = envelope["at"]


@pytest.fixture
def adapter() -> Adapter:
    return Adapter()


@pytest.fixture
def newcomer(adapter: Adapter) -> Iterator[Newcomer]:
    """Its script has done 5 of 9 steps when the first failure comes."""
    overlay = SimpleNamespace(passes=lambda: None)
    in_place = SimpleNamespace(passed=lambda: None)
    session: Any = SimpleNamespace(protecting=False, overlay=overlay, in_place=in_place)
    script: Any = object.__new__(Script)
    script.engine, script.session, script.position, script._counted = None, session, 5, Counter()
    script.made_up = SimpleNamespace(passes=ignored, answered=ignored, known=ignored)
    script.draws = SimpleNamespace(follow=ignored)
    live: Any = SimpleNamespace(go_on=lambda: None)
    state: Any = adapter
    found = Newcomer(script, state, live, lambda: None, lambda: None)
    found._way = CatchUp(5)
    found._way.until = 9
    yield found
    found._way.close()


def test_a_recovery_that_is_cut_short_after_its_restore_leaves_the_script_where_it_is(
    newcomer: Newcomer, adapter: Adapter
) -> None:
    newcomer.interrupted()
    adapter.at = "where the engine is"  # it is restored, and another epoch begins
    newcomer.interrupted()
    adapter.at = "where the engine is"
    newcomer.follow(9)
    assert adapter.at == "where the script is"


def test_where_the_script_is_then_is_where_it_is_later(newcomer: Newcomer, adapter: Adapter) -> None:
    newcomer.interrupted()
    newcomer.follow(9)
    adapter.at = "further on"
    call: Any = SimpleNamespace(
        kind="evaluation", ends_step=False, losses=[], answer=lambda results, number: None
    )
    newcomer.answer(call)
    newcomer.interrupted()
    adapter.at = "where the engine is"
    newcomer.follow(9)
    assert adapter.at == "further on"

"""A newcomer's script that is interrupted on its way: the engine, the session and the state are stand-ins."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ft_deepspeed.catch_up import CatchUp
from ft_deepspeed.protection import Phase, Protection
from ft_deepspeed.results import Results


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


def newcomer() -> tuple[Protection, Adapter]:
    found: Any = object.__new__(Protection)
    adapter = Adapter()
    found._adapter, found._phase, found._position, found._counted = adapter, Phase.CATCHING_UP, 5, Counter()
    found._outside = found._script = None
    found._catch_up = SimpleNamespace(until=9, envelope=None)
    found._made_up = SimpleNamespace(passes=ignored, answered=ignored, known=ignored, rests=lambda: None)
    found.draws = SimpleNamespace(follow=lambda draws: None)
    overlay = SimpleNamespace(passes=lambda: None)
    found._session = SimpleNamespace(protecting=False, passed=lambda: None, overlay=overlay)
    return found, adapter


def test_a_recovery_that_is_cut_short_after_its_restore_leaves_the_script_where_it_is() -> None:
    protection, adapter = newcomer()
    protection.interrupted()
    adapter.at = "where the engine is"  # it is restored, and another epoch begins
    protection.interrupted()
    adapter.at = "where the engine is"
    protection._follow(9)
    assert adapter.at == "where the script is"


def test_where_the_script_is_then_is_where_it_is_later() -> None:
    protection, adapter = newcomer()
    protection.interrupted()
    protection._follow(9)
    adapter.at = "further on"
    call: Any = SimpleNamespace(
        kind="evaluation", ends_step=False, losses=[], answer=lambda results, number: None
    )
    protection._answer(call)
    protection.interrupted()
    adapter.at = "where the engine is"
    protection._follow(9)
    assert adapter.at == "further on"

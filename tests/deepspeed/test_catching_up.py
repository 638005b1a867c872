"""A newcomer's script that is interrupted on its way: the engine, the session and the state are stand-ins."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ft_core import kept
from ft_deepspeed.calls import Call, Step
from ft_deepspeed.catch_up import CatchUp
from ft_deepspeed.newcomer import Newcomer
from ft_deepspeed.results import Results
from ft_deepspeed.script import Script
from ft_deepspeed.unknown import DECIDES, UnknownFloat


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


def ignored(*_: Any) -> None:
    pass


class RefusedError(Exception):
    """The script cannot get where the others are."""


def refused(why: str) -> None:
    raise RefusedError(why)


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

    def passed(self) -> None:
        pass


@pytest.fixture
def adapter() -> Adapter:
    return Adapter()


@pytest.fixture
def newcomer(adapter: Adapter) -> Iterator[Newcomer]:
    """Its script has done 5 of 9 steps when the first failure comes."""
    overlay = SimpleNamespace(
        passes=lambda: None, read_since=lambda since, here: "own.pt" * (since < 100 and here)
    )
    in_place = SimpleNamespace(passed=lambda: None, reached=ignored, cannot_pass=refused)
    session: Any = SimpleNamespace(
        protecting=False, goes_on_from_memory=True, overlay=overlay, in_place=in_place
    )
    script: Any = object.__new__(Script)
    script.engine = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    script.session, script.position, script._counted = session, 5, Counter()
    script.began_at, script.machine = 0, "here"
    script.made_up = SimpleNamespace(passes=ignored, answered=ignored, known=ignored)
    script.draws = SimpleNamespace(follow=ignored)
    script.loads = SimpleNamespace(follow=ignored)
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


@pytest.mark.parametrize(
    ("first", "since", "refuses"), [(0, 50.0, True), (0, 150.0, False), (3, 50.0, False)]
)
def test_a_script_that_goes_by_a_file_written_in_training_is_refused(
    newcomer: Newcomer, adapter: Adapter, first: int, since: float, refuses: bool
) -> None:
    """Unless it has resumed by `engine.load_checkpoint`, and begins further on."""
    newcomer.interrupted()
    newcomer._script.machine = "here"
    adapter.loaded |= {"first": first, "since": since, "machine": "here"}
    with pytest.raises(RefusedError, match=r"own\.pt") if refuses else contextlib.nullcontext():
        newcomer.follow(9)


def test_where_the_script_is_then_is_where_it_is_later(newcomer: Newcomer, adapter: Adapter) -> None:
    newcomer.interrupted()
    newcomer.follow(9)
    adapter.at = "further on"
    call: Any = SimpleNamespace(
        kind="evaluation", ends_step=False, losses=[], trained=[], answer=lambda results, number: None
    )
    newcomer.answer(call)
    newcomer.interrupted()
    adapter.at = "where the engine is"
    newcomer.follow(9)
    assert adapter.at == "further on"


class BySamples:
    """Has to be told how many there were, as Megatron's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int) -> None:
        self.samples += increment
        self.optimizer.param_groups[0]["lr"] = 1.0 / (1 + self.samples)


def passes(newcomer: Newcomer, make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The learning rate after a step whose call of `engine.step` is answered."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    engine: Any = SimpleNamespace(
        lr_scheduler=make(optimizer),
        optimizer=SimpleNamespace(),
        device=torch.device("cpu"),
        train_batch_size=lambda: 8,
        is_gradient_accumulation_boundary=lambda: True,
    )
    script = newcomer._script
    newcomer._engine = script.engine = engine
    script.dealing, script.results = None, Results()
    script.results.record_norm(5, SimpleNamespace(_global_grad_norm=None))
    newcomer.answer(Step(engine, None, args, kwargs))
    assert script.position == 6
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


PLATEAU = functools.partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.0)


def test_a_schedule_of_a_step_that_is_passed_is_given_what_it_was_given(newcomer: Newcomer) -> None:
    def worse(optimizer: Any) -> ReduceLROnPlateau:
        found = PLATEAU(optimizer)
        found.step(1.0)
        return found

    assert passes(newcomer, worse, (), {"lr_kwargs": {"metrics": 2.0}}) == 0.5
    newcomer._script.position = 5
    assert passes(newcomer, worse, ({"metrics": 0.5},), {}) == 1.0
    newcomer._script.position = 5
    assert passes(newcomer, BySamples, (), {}) == 1.0 / 9


def test_a_schedule_that_goes_by_what_is_not_known_is_refused(newcomer: Newcomer) -> None:
    metrics = UnknownFloat.made(2.0, 5, refused)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match=DECIDES):
        passes(newcomer, PLATEAU, (), {"lr_kwargs": {"metrics": metrics}})


@pytest.mark.parametrize(
    ("made", "fewer"), [([2, 2, 2], ""), ([1, 2, 3], ""), ([2, 1, 2], "step 7 "), ([2, 2], "")]
)
def test_a_step_in_which_it_makes_fewer_calls_than_its_predecessor_is_not_passed(
    newcomer: Newcomer, adapter: Adapter, made: list[int], fewer: str
) -> None:
    """But for the first, in which it may have begun later."""
    refused: list[str] = []
    script, results = newcomer._script, Results()
    for version in range(5, 9):
        for _ in range(2):
            results.record("forward", version, torch.ones(()))
        results.record("grad norm", version, torch.ones(()))
        results.record_after(version, "step", 0, {"loss": 1.0})
    script.dealing, script.results = None, results
    script.engine = SimpleNamespace(lr_scheduler=None, optimizer=SimpleNamespace(state={}), device="cpu")
    script.session.in_place.cannot_pass = refused.append  # type: ignore[method-assign, assignment]
    script.session.in_place.reached = ignored  # type: ignore[method-assign]
    newcomer._engine, newcomer._from = script.engine, 5
    newcomer._watch = ignored  # type: ignore[method-assign]
    adapter.passed = lambda: None  # type: ignore[attr-defined]

    def call(kind: str) -> Any:
        ends = kind == "step"
        return SimpleNamespace(
            kind=kind, ends_step=ends, losses=[], trained=[], answer=lambda results, number: None
        )

    for many in made:
        for kind in ["forward"] * many + ["step"]:
            newcomer.answer(call(kind))
    assert len(refused) == bool(fewer) and all(fewer in said for said in refused)


def test_the_engines_memory_is_as_it_was_before_the_script_arrives(
    newcomer: Newcomer, adapter: Adapter
) -> None:
    done: list[str] = []
    script = newcomer._script
    script.made_up.puts_back = lambda: done.append("put back")  # type: ignore[method-assign]
    script.session.protecting = True  # type: ignore[misc]
    script.session.in_place.reached = ignored  # type: ignore[method-assign]
    script.dealing, script.results = None, Results()
    newcomer.keep_up = lambda: None  # type: ignore[method-assign]
    newcomer._check_counted = ignored  # type: ignore[method-assign]
    script.results.answer_norm = lambda *about: None  # type: ignore[method-assign]
    newcomer._go_live = lambda: done.append("live")  # type: ignore[method-assign]
    newcomer._engine = SimpleNamespace(lr_scheduler=None, optimizer=SimpleNamespace(state={}))
    adapter.passed = lambda: None  # type: ignore[attr-defined]
    assert newcomer._way is not None
    newcomer._way.until = 6
    newcomer.answer(
        SimpleNamespace(kind="step", ends_step=True, losses=[], trained=[], answer=lambda *about: None)
    )  # type: ignore[arg-type]
    assert done == ["put back", "live"]


class Trains(Call):
    """A backward pass that gives gradients to what is not the engine's."""

    kind = "backward"

    def __init__(self, engine: Any, *trained: torch.Tensor) -> None:
        super().__init__(engine, None, (), {})
        self._trained = list(trained)

    @property
    def trained(self) -> list[torch.Tensor]:
        return self._trained

    def answer(self, results: Results, number: int) -> Any:
        return None


def test_what_the_script_trains_itself_is_named_or_refused(
    newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_named", {})
    engine, script = newcomer._engine, newcomer._script
    script.results = Results()
    newcomer._left = ignored  # type: ignore[method-assign]
    head, alpha = torch.nn.Linear(3, 1), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([*head.parameters(), alpha], lr=0.1)
    newcomer.answer(Trains(engine, *torch.nn.Linear(3, 1).parameters()))  # which nobody steps
    for script.position in (5, 6):
        newcomer.answer(Trains(engine, torch.zeros(2, requires_grad=True)))  # another in each step
    with pytest.raises(RefusedError, match=r"a tensor of shape \(1, 3\) itself"):
        newcomer.answer(Trains(engine, *head.parameters()))
    kept.keep(head=head)
    newcomer.answer(Trains(engine, *head.parameters()))
    newcomer.answer(Trains(engine, alpha))
    newcomer.answer(Trains(engine, alpha))  # with another micro batch
    script.position = 7
    with pytest.raises(RefusedError, match=r"keep\(\.\.\.=\.\.\.\)"):
        newcomer.answer(Trains(engine, alpha))
    kept.keep(alpha=alpha)
    newcomer.answer(Trains(engine, alpha))
    del optimizer

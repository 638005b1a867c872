"""Each feature has a whole job in what `make test` runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from layers import CHAOS, COLLECTED, MORE, QUICK


def listed() -> list[str]:
    return [test for tests in QUICK.values() for test in tests]


def test_each_file_of_whole_jobs_has_a_quick_one_or_says_of_which_it_has_more() -> None:
    quick = {test.partition("::")[0] for test in listed()}
    assert all(QUICK.values())
    assert not quick & MORE.keys()
    assert quick | MORE.keys() == {path.name for path in CHAOS.glob("test_*.py")}


@pytest.mark.parametrize("test", listed())
def test_it_is_there(test: str, request: pytest.FixtureRequest) -> None:
    """By its name; with its parameters, and not `exhaustive`, where all of tests/chaos was collected."""
    file, _, name = test.partition("::")
    body = ast.parse((CHAOS / file).read_text()).body
    assert name.partition("[")[0] in {found.name for found in body if isinstance(found, ast.FunctionDef)}
    collected = request.config.stash[COLLECTED]
    if all_collected(request.config) and file in {found.partition("::")[0] for found in collected}:
        assert test in collected | {found.partition("[")[0] for found in collected}


def all_collected(config: pytest.Config) -> bool:
    return any(
        CHAOS.is_relative_to(Path(config.invocation_params.dir, path).resolve()) for path in config.args
    )

"""The list of tests: what is gone, or new, is said by name."""

from __future__ import annotations

from pathlib import Path

from tests.names import complaints, names


def test_each_test_function_has_a_name_in_the_list(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    text = "async def test_a(): ...\ndef helper(): ...\nclass TestB:\n    def test_c(self): ...\n"
    (tmp_path / "core" / "test_x.py").write_text(text)
    (tmp_path / "core" / "jobs.py").write_text("def test_d(): ...\n")
    assert names(tmp_path) == {"core/test_x.py::test_a", "core/test_x.py::TestB::test_c"}


def test_what_is_gone_is_named_as_is_what_is_new() -> None:
    assert complaints({"a", "b"}, {"b", "c"}) == ["a is gone", "c is not in the list"]
    assert complaints({"a"}, {"a"}) == []

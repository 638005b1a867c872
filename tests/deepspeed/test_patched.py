"""What is patched is there, in the version of DeepSpeed that the tests use."""

from __future__ import annotations

import pytest

from ft_core.patching import Patch, declared

PATCHES = [p for p in declared(["ft_deepspeed"]) if not p.optional and not p.made_later]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.target)
def test_there_is_what_is_patched(patch: Patch) -> None:
    assert patch.original() is not None

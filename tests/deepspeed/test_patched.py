"""What is patched is there, in the version of DeepSpeed that the tests use."""

from __future__ import annotations

import pytest

from ft_core.patching import Patch, declared

# In one process with tests of Megatron's adapter, what that patches is declared as well.
DECLARED = [patch for patch in declared(["ft_deepspeed"]) if patch.target.startswith("deepspeed")]
PATCHES = [patch for patch in DECLARED if not patch.optional and not patch.made_later]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.target)
def test_there_is_what_is_patched(patch: Patch) -> None:
    assert patch.original() is not None

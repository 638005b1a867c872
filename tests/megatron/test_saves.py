"""What a recovery makes of Megatron's checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_megatron import saves


def write(checkpoints: Path, iteration: int, complete: bool) -> None:
    directory = checkpoints / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").touch()
    if complete:
        (directory / ".metadata").touch()


@pytest.mark.parametrize("given", [None, "elsewhere"])
def test_a_torn_checkpoint_does_not_cost_the_complete_one_before_it(
    given: str | None, tmp_path: Path
) -> None:
    checkpoints = tmp_path / (given or "saved/non_persistent")
    write(checkpoints, 10, complete=True)
    write(checkpoints, 20, complete=False)  # given up in a recovery
    write(tmp_path / "saved", 15, complete=False)  # where Megatron removes none
    args = SimpleNamespace(
        save=str(tmp_path / "saved"),
        ckpt_format="torch_dist",
        non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=given and str(checkpoints),
    )
    saves.remove_torn(args)
    assert [path.name for path in checkpoints.iterdir()] == ["iter_0000010"]
    assert (tmp_path / "saved" / "iter_0000015").exists()


def test_megatron_removes_a_complete_checkpoint_before_a_torn_one(tmp_path: Path) -> None:
    """Else nothing would have to be removed before it does."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing", exc_type=ImportError)
    checkpoints = tmp_path / "saved/non_persistent"
    write(checkpoints, 10, complete=True)
    write(checkpoints, 20, complete=False)
    checkpointing.cleanup_old_non_persistent_checkpoint(checkpoints, leave_ckpt_num=1)
    assert [path.name for path in checkpoints.iterdir()] == ["iter_0000020"]


def test_nothing_is_removed_where_no_checkpoint_is_non_persistent(tmp_path: Path) -> None:
    write(tmp_path / "non_persistent", 20, complete=False)
    saves.remove_torn(SimpleNamespace(save=str(tmp_path), non_persistent_ckpt_type=None))
    assert (tmp_path / "non_persistent" / "iter_0000020").exists()

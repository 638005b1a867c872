"""What protection costs on the network: unique state, once per snapshot, and no collective."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import (
    TINY,
    Job,
    Layout,
    check_identical,
    read_digest,
    read_logs,
    read_losses,
    reference,
    torchrun,
)

from ft_core.state.manifest import ALIGN
from ft_megatron.planner import Gpt

HERE = Path(__file__).parent
STEPS = 12


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        (Layout(1, 1, 2, distributed=True, bf16=True), 1),
        (Layout(1, 1, 2, distributed=True), 1),
        (Layout(1, 2, 2, distributed=True, bf16=True), 2),
        (Layout(1, 1, 2, bf16=True), 1),
    ],
    ids=str,
)
def test_bytes_between_hosts(layout: Layout, nproc: int, tmp_path):
    """To the byte, what leaves a node for a role is the segments that no other node holds."""
    with Job(tmp_path / "job", layout, STEPS, nproc=nproc, spares=0, script=HERE / "accounted.py") as job:
        rows = job.wait_for_snapshots(STEPS + 1)
        (job.job_dir / "go").touch()
        result = job.finish()
        logs = read_logs(job.job_dir)
    check_identical(result, layout, STEPS)
    snapshots = _snapshots(logs)
    state = {int(r): (int(b), int(c)) for r, b, c in re.findall(r"^state (\d+) (\d+) (\d+)$", logs, re.M)}
    assert set(state) == set(snapshots) == {row["role"] for row in rows} == set(range(layout.world))
    for row in rows:
        role = row["role"]
        assert len(snapshots[role]) == STEPS + 1
        expected = sum(
            nbytes
            for segments in snapshots[role]
            for holders, nbytes, _, _ in segments
            if len({holder // nproc for holder in holders}) == 1 and min(holders) == role
        )
        assert row["h2h_bytes"] == expected
        if not layout.distributed:
            assert expected == 0
            continue
        unique = [s for s in snapshots[role][-1] if s[0] == [role]]
        assert len(unique) == 1
        _, nbytes, items, envelope = unique[0]
        gaps = nbytes - envelope - sum(state[role])
        assert 0 <= gaps < ALIGN * items
    if layout.distributed:
        assert sum(b for b, _ in state.values()) == 12 * _parameters(layout)


def _snapshots(logs: str) -> dict[int, list]:
    found: dict[int, list] = {}
    for role, text in re.findall(r"^snapshot (\d+) (.*)$", logs, re.M):
        found.setdefault(int(role), []).append(json.loads(text))
    return found


def _parameters(layout: Layout) -> int:
    """Of all stages, as Megatron has them."""
    flags = dict(zip(TINY[0:-1:2], TINY[1:-1:2], strict=True))
    model = Gpt(
        num_layers=int(flags["--num-layers"]),
        hidden_size=int(flags["--hidden-size"]),
        num_attention_heads=int(flags["--num-attention-heads"]),
        seq_length=int(flags["--seq-length"]),
        vocab_size=257,  # bytes and an end of text
        world_size=layout.world,
        tp=layout.tp,
        pp=layout.pp,
    )
    return sum(t.parameters for stage in range(layout.pp) for t in model.tensors(stage))


@pytest.mark.parametrize("layout", [Layout(1, 2, 2, distributed=True, bf16=True), Layout(2, 1, 2)], ids=str)
def test_no_collective_is_added(layout: Layout, tmp_path):
    script = HERE / "counted.py"
    plain, expected = torchrun(layout, script, STEPS), reference(layout, STEPS)
    assert (read_losses(plain), read_digest(plain)) == (expected.losses, expected.digest), "forks are alike"
    with Job(tmp_path / "job", layout, STEPS, nproc=2, spares=0, script=script) as job:
        result = job.finish()
        logs = read_logs(job.job_dir)
    check_identical(result, layout, STEPS)
    without, protected = _counted(plain), _counted(logs)
    assert set(without) == {(rank, step) for rank in range(layout.world) for step in range(STEPS - 1)}
    assert sum(without[0, 1].values()) >= 5
    assert protected == without


def _counted(text: str) -> dict[tuple[int, int], dict[str, int]]:
    return {
        (int(rank), int(step)): json.loads(found)
        for rank, step, found in re.findall(r"counted (\d+) (\d+) (\{.*?\})", text)
    }

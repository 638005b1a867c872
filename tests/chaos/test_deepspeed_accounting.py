"""What protection costs a DeepSpeed job on the network: unique state once per snapshot, and no collective."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from deepspeed_jobs import TINY, Pipeline, Zero
from harness import Job, Result, Training, read_logs, undisturbed
from planned import described, parameters

from ft_core.cli import ask
from ft_core.cli.planner import command
from ft_core.cli.planner.razor import plan
from ft_core.cli.planner.shape import PlannedJob
from ft_core.protocol.messages import DescribeRole, RoleDescribed
from ft_core.state.manifest import ENVELOPE

STEPS = 6
MEASURED = Path(__file__).parent / "measured.py"
VOCABULARY = 257  # bytes and an end of text


@dataclass(frozen=True)
class Measured:
    """A training whose script is measured.py, under torchrun as well."""

    training: Training

    @property
    def world(self) -> int:
        return self.training.world

    @property
    def script(self) -> Path:
        return MEASURED

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return self.training.arguments(iterations, protected)

    def environment(self) -> dict[str, str]:
        return self.training.environment()


@dataclass
class Accounts:
    """What measured.py printed in a job, and what `ftctl` said of it at its end."""

    result: Result
    rows: list[dict]
    planned: dict[int, dict]
    logs: str

    def of(self, what: str) -> dict[int, list]:
        """By role, in order."""
        return printed(what, self.logs)

    @cached_property
    def unique(self) -> dict[int, dict[str, tuple[list[int], int]]]:
        """By role: name -> (shape, bytes) of what it alone holds after the last step."""
        return {
            role: {
                n: (shape, nbytes)
                for holders, items in found
                for n, shape, nbytes in items
                if holders == [role]
            }
            for role, found in self.of("segment").items()
        }


def printed(what: str, text: str) -> dict[int, list]:
    """By role."""
    found: dict[int, list] = {}
    for line in re.finditer(rf"^{what} (\d+) ", text, re.MULTILINE):
        value, _ = json.JSONDecoder().raw_decode(text, line.end())
        found.setdefault(int(line[1]), []).append(value)
    return found


def protected(
    training: Training, job_dir: Path, capsys: pytest.CaptureFixture[str], nproc: int = 1
) -> Accounts:
    """Run it under ftrun to its end."""
    with Job(job_dir, Measured(training), STEPS, nproc=nproc, spares=0) as job:
        rows = job.wait_for_snapshots(STEPS + 1)
        planned = {}
        for role in range(training.world):
            with ask.line(job_dir) as found:
                answer, hosts = found.expect(DescribeRole(role), RoleDescribed), found.hosts()
            command.of_running(answer, hosts, as_json=True)
            planned[role] = json.loads(capsys.readouterr().out)
        (job_dir / "go").touch()
        return Accounts(job.finish(), rows, planned, read_logs(job_dir))


def check_bytes(accounts: Accounts, nproc: int) -> None:
    """To the byte, what left a node for a role is the segments that no other node holds."""
    snapshots = accounts.of("snapshot")
    for row in accounts.rows:
        role = row["role"]
        sent = [
            sum(
                nbytes
                for holders, nbytes in segments
                if len({holder // nproc for holder in holders}) == 1 and min(holders) == role
            )
            for segments in snapshots[role]
        ]
        assert len(sent) == STEPS + 1
        assert row["h2h_bytes"] == sum(sent)
        assert accounts.planned[role]["h2h_bytes_per_step"] == sent[-1]


def check_collectives(accounts: Accounts, plain: Result, world: int) -> None:
    """As many of each kind, on each rank and in each step, as in the same training under torchrun."""
    assert accounts.result.code == 0, accounts.result.output[-3000:]
    assert (accounts.result.losses, accounts.result.digest) == (plain.losses, plain.digest)
    assert len(plain.losses) == STEPS and plain.digest
    without = printed("counted", plain.output)
    assert sorted(without) == list(range(world))
    for steps in without.values():
        assert [step for step, _ in steps] == list(range(2, STEPS + 1))
        assert min(sum(counts.values()) for _, counts in steps) >= 3
    assert accounts.of("counted") == without


@pytest.mark.parametrize(
    ("training", "per_parameter"),
    [
        (Zero(0, gas=2), 0),
        # Weights follow from the main parameters of all, in fp32 too: nobody keeps them, or sends them.
        (Zero(1, gas=2), 12),
        (Zero(2, gas=2, bf16=True), 12),
        (Zero(3, gas=2), 12),
    ],
    ids=lambda value: str(value) if not isinstance(value, int) else None,
)
def test_zero(training: Zero, per_parameter: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = undisturbed(Measured(training), STEPS)
    accounts = protected(training, tmp_path / "job", capsys)
    check_collectives(accounts, plain, training.world)
    check_bytes(accounts, nproc=1)
    for role, items in accounts.unique.items():
        assert accounts.planned[role]["unique_bytes"] >= sum(nbytes for _, nbytes in items.values())
        if training.stage == 0:
            assert set(items) == {ENVELOPE}  # random states, and what the script was given
    model, hidden = planned(training)
    sizes = accounts.of("parameters")[0][0]
    count = parameters(model)  # with a vocabulary as Megatron pads it
    assert sum(sizes) == count - -VOCABULARY % 128 * hidden
    unique = [
        items for found in accounts.unique.values() for name, items in found.items() if name != ENVELOPE
    ]
    state = sum(nbytes for shape, nbytes in unique if shape)  # others are numbers of steps
    assert state == per_parameter * padded(sizes, training)
    assert plan(model).unique == pytest.approx(per_parameter * count / training.dp, abs=64)


def planned(training: Zero) -> tuple[PlannedJob, int]:
    """As `ftctl plan` is told of it, and the hidden size."""
    flags = dict(zip(TINY[0:-1:2], TINY[1:-1:2], strict=True))
    names = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
    job = described(
        *(f"{name} {flags[name]}" for name in names),
        f"--vocab-size {VOCABULARY} --world-size {training.world} --nproc-per-node 1",
        f"--zero-stage {training.stage}",
        "--bf16" * training.bf16,
    )
    return job, int(flags["--hidden-size"])


def padded(sizes: list[int], training: Zero) -> int:
    """Parameters that all ranks together keep state of: stage 3 pads each, stages 1 and 2 their sum."""
    if training.stage == 3:
        return sum(math.ceil(size / training.dp) * training.dp for size in sizes)
    unit = 2 * training.dp  # parts begin at a multiple of two elements
    return math.ceil(sum(sizes) / unit) * unit


def test_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Peers of a stage are on one node: what they have in common dies with it, and is sent by one of them."""
    training = Pipeline(zero=1)
    plain = undisturbed(Measured(training), STEPS)
    accounts = protected(training, tmp_path / "job", capsys, nproc=2)
    check_collectives(accounts, plain, training.world)
    check_bytes(accounts, nproc=2)

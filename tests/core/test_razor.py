from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from itertools import combinations

import pytest

from ft_core.cli.planner import command
from ft_core.cli.planner.razor import Job, plan, summarise, tensors
from ft_core.cli.planner.survival import loss_bound, recovery_probability, ring_survival
from ft_core.errors import ConfigError
from ft_core.state.manifest import layout

GPT2_MEDIUM = Job(24, 1024, 16, 1024, 50257, world_size=4, nproc_per_node=1)
PARAMETERS = 24 * (12 * 1024**2 + 13 * 1024) + 50304 * 1024 + 1024 * 1024 + 2 * 1024


def test_parameters_of_gpt2_medium() -> None:
    assert sum(t.parameters for t in tensors(GPT2_MEDIUM, 0)) == PARAMETERS == 354_871_296


def test_parameters_of_llama_2_7b() -> None:
    llama = Job(
        32,
        4096,
        32,
        4096,
        32000,
        world_size=1,
        ffn_hidden_size=11008,
        swiglu=True,
        bias=False,
        rmsnorm=True,
        learned_positions=False,
        untied=True,
    )
    assert sum(t.parameters for t in tensors(llama, 0)) == 6_738_415_616
    # Tensor parallelism pads the vocabulary and splits all but the norms; stages share the layers out.
    split = replace(llama, tp=4, pp=2, world_size=8)
    norms, padding = 65 * 4096, 2 * 256 * 4096
    stages = [sum(t.parameters for t in tensors(split, s)) for s in range(2)]
    assert sum(stages) == (6_738_415_616 + padding - norms) // 4 + norms


@pytest.mark.parametrize(
    ("flags", "unique_per_parameter", "total_per_parameter"),
    [
        ({}, 0, 12),  # plain data parallelism, fp32: parameters and two moments everywhere
        ({"precision": "bf16"}, 0, 14),
        ({"distributed_optimizer": True}, 8 / 4, 4 + 8 / 4),  # main parameters are views of the parameters
        ({"distributed_optimizer": True, "precision": "bf16"}, 12 / 4, 2 + 12 / 4),
        ({"distributed_optimizer": True, "precision": "fp16", "optimizer": "sgd"}, 8 / 4, 2 + 8 / 4),
        ({"distributed_optimizer": True, "instances": 2, "precision": "bf16"}, 0, 2 + 12 / 2),
        ({"zero_stage": 1, "precision": "bf16"}, 12 / 4, 2 + 12 / 4),
        ({"zero_stage": 2}, 8 / 4, 4 + 8 / 4),
        ({"zero_stage": 3, "precision": "bf16"}, 12 / 4, 12 / 4),  # the weights are their rounding
        ({"zero_stage": 3}, 12 / 4, 12 / 4),
        ({"distributed_optimizer": True, "precision": "bf16", "tp": 4}, 14, 14),  # DP 1: everything
    ],
)
def test_unique_bytes(flags: dict, unique_per_parameter: float, total_per_parameter: float) -> None:
    job = replace(GPT2_MEDIUM, **flags)
    found = plan(job)
    parameters = sum(t.parameters for t in tensors(job, 0))
    assert found.unique == pytest.approx(unique_per_parameter * parameters, abs=64)
    assert found.nbytes == pytest.approx(total_per_parameter * parameters, abs=64)
    assert found.sent_per_rank == pytest.approx(found.unique, abs=64)
    assert found.snapshots_per_rank == 2 * found.nbytes
    # Each node keeps what its predecessor sends, in two slots.
    assert found.memory_per_node == pytest.approx(2 * (found.nbytes + found.unique), abs=512)
    assert found.survives >= 1


def test_replicas_multiply_the_traffic() -> None:
    job = replace(GPT2_MEDIUM, distributed_optimizer=True, replicas=2)
    found = plan(job)
    assert found.sent_per_rank == 2 * plan(replace(job, replicas=1)).sent_per_rank
    assert (found.survives, found.copies) == (2, {3: 4, 4: 1})


def test_experts_without_data_parallel_peers_are_unique() -> None:
    moe = replace(GPT2_MEDIUM, num_experts=4, ep=4)  # EDP 1, DP 4
    rows = {row.tensor: row for row in plan(moe).rows}
    assert rows["experts"].unique == rows["experts"].nbytes == 24 * 12 * (8 * 1024**2 + 5 * 1024)
    assert all(row.unique == 0 for name, row in rows.items() if name != "experts")
    pairs = {row.tensor: row for row in plan(replace(moe, ep=2)).rows}  # EDP 2
    assert pairs["experts"].unique == 0


def test_peers_on_one_node_are_replicated() -> None:
    """PP 2, DP 4 on nodes of 4: a stage is a node, so its parameters are sent, by one of the four."""
    job = replace(GPT2_MEDIUM, world_size=8, pp=2, nproc_per_node=4)
    found = plan(job)
    assert found.unique == 0
    assert found.same_domain == 2
    assert found.sent_per_rank == found.nbytes
    assert found.survives == 1
    spread = plan(replace(job, nproc_per_node=1))
    assert (spread.sent_per_rank, spread.same_domain, spread.copies) == (0, 0, {4: 2})


def test_one_node_survives_nothing() -> None:
    found = plan(replace(GPT2_MEDIUM, nproc_per_node=4, distributed_optimizer=True))
    assert (found.survives, found.sent_per_rank) == (0, 0)


def test_free_checkpointing_ratio_is_the_papers() -> None:
    """DBSV / 2F for mixed precision and Adam, here with all parameters taking part in the products."""
    job = replace(
        GPT2_MEDIUM,
        distributed_optimizer=True,
        precision="bf16",
        global_batch_size=64,
        learned_positions=False,
    )
    found = plan(job)
    dp, per_device, bandwidth, flops = 4, 64 / 4, 400e9 / 8, 100e12
    expected = dp * per_device * 1024 * bandwidth / (2 * flops)
    step = found.compute_seconds(flops)
    assert found.free_checkpointing_ratio(step, bandwidth) == pytest.approx(expected, rel=1e-6)
    assert math.isinf(plan(GPT2_MEDIUM).free_checkpointing_ratio(1.0, bandwidth))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("nodes", [3, 6, 9])
def test_ring_survival_against_enumeration(nodes: int, replicas: int) -> None:
    for failed in range(nodes + 1):
        cases = [set(c) for c in combinations(range(nodes), failed)]
        good = sum(
            not any(all((i + j) % nodes in lost for j in range(replicas + 1)) for i in range(nodes))
            for lost in cases
        )
        assert ring_survival(nodes, failed, replicas) == pytest.approx(good / len(cases))


def test_recovery_probability() -> None:
    # Two nodes, one replica: lost if both fail.
    lost = 1 - math.exp(-8 * 12 / 1000)
    assert recovery_probability(2, 8, 1000, 12) == pytest.approx(1 - lost**2)
    # FFTrainer, 6.2: above 99 % within 12 hours, for thousands of devices.
    assert 0.99 < recovery_probability(500, 8, 80_000, 12) < recovery_probability(500, 8, 80_000, 12, 2) <= 1
    assert recovery_probability(4, 8, 1e-9, 12) == 0


def test_loss_bound_of_the_paper() -> None:
    assert loss_bound({2: 128}, 1e-6) == pytest.approx(1.28e-10)
    assert loss_bound({3: 128}, 1e-4) * 1e5 == pytest.approx(1.28e-5)


@pytest.mark.parametrize(
    "flags",
    [
        {"tp": 3},
        {"pp": 2, "num_layers": 3},
        {"zero_stage": 1, "distributed_optimizer": True},
        {"instances": 2},
        {"distributed_optimizer": True, "instances": 3},
        {"num_experts": 3, "ep": 2},
    ],
)
def test_flags_that_clash(flags: dict) -> None:
    with pytest.raises(ConfigError):
        replace(GPT2_MEDIUM, **flags)


def test_summary_of_a_live_role() -> None:
    shared = layout((0, 1), [("w", "float32", (4,), 16), ("b", "float32", (2,), 8)])
    own = layout((1,), [("exp_avg", "float32", (6,), 24)])
    nodes = {0: "a", 1: "a", 2: "b"}
    rows = {row.tensor: row for row in summarise([shared, own], nodes, {}, 1, role=1)}
    assert list(rows) == ["exp_avg", "w", "b"]
    assert (rows["exp_avg"].unique, rows["exp_avg"].sent_to, rows["exp_avg"].domains) == (True, ("b",), 2)
    # Held by two roles of one node: replicated, but by role 0.
    assert (rows["w"].unique, rows["w"].holders, rows["w"].sent_to, rows["w"].domains) == (False, 2, (), 2)


FLAGS = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257
    --bf16 --use-distributed-optimizer --world-size 64 --global-batch-size 512
    --network-gbps 50 --device-tflops 400 --mtbf-hours 80000"""


def ftctl(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([*FLAGS.split(), *flags]))


def test_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl() == 0
    text = capsys.readouterr().out
    assert "any 1 lost node at once" in text
    assert "66.54 MB of 776.3 MB (9%)" in text  # 12 / 64 of 14 bytes a parameter


def test_plan_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl("--json", "--ft-replicas", "2") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["survives"] == 2
    assert figures["sent_bytes_per_rank_and_step"] == 2 * figures["unique_bytes_per_rank"]


def test_plan_says_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl("--ft-replicas", "8") == 1
    assert "WARNING: 8 lost domains cannot be survived: there are 8" in capsys.readouterr().out
    assert ftctl("--ft-replicas", "8", "--spares", "1") == 0  # which has memory too
    assert "any 8 lost nodes at once" in capsys.readouterr().out
    assert ftctl("--tensor-model-parallel-size", "3") == 2
    assert "--world-size" in capsys.readouterr().err

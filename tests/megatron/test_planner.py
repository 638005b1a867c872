"""`ftctl plan` for Megatron's GPT model, whose optimizer Megatron or DeepSpeed shards."""

from __future__ import annotations

import argparse
import json
import math

import pytest
from planned import FRAMEWORKS, described, parameters

from ft_core.cli.planner import command
from ft_core.cli.planner.razor import plan
from ft_core.errors import ConfigError

GPT2_MEDIUM = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257 "
    "--world-size 4 --nproc-per-node 1"
)
PARAMETERS = 24 * (12 * 1024**2 + 13 * 1024) + 50304 * 1024 + 1024 * 1024 + 2 * 1024
LLAMA_2_7B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 32000 "
    "--ffn-hidden-size 11008 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type none --untie-embeddings-and-output-weights"
)
DISTRIBUTED = "--use-distributed-optimizer"


def test_parameters_of_gpt2_medium() -> None:
    assert parameters(described(GPT2_MEDIUM)) == PARAMETERS == 354_871_296


def test_parameters_of_llama_2_7b() -> None:
    assert parameters(described(LLAMA_2_7B, "--world-size 1")) == 6_738_415_616
    # Tensor parallelism pads the vocabulary and splits all but the norms; stages share the layers out.
    layout = "--world-size 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    split = described(LLAMA_2_7B, layout)
    norms, padding = 65 * 4096, 2 * 256 * 4096
    assert (
        sum(parameters(split, stage) for stage in range(2)) == (6_738_415_616 + padding - norms) // 4 + norms
    )


@pytest.mark.parametrize(
    ("flags", "unique_per_parameter", "total_per_parameter"),
    [
        ("", 0, 12),  # plain data parallelism, fp32: parameters and two moments everywhere
        ("--bf16", 0, 14),
        (DISTRIBUTED, 12 / 4, 12 / 4),  # the weights are the rounding of the main parameters
        (f"{DISTRIBUTED} --bf16", 12 / 4, 12 / 4),
        (f"{DISTRIBUTED} --fp16 --optimizer sgd", 8 / 4, 8 / 4),
        (f"{DISTRIBUTED} --bf16 --num-distributed-optimizer-instances 2", 0, 12 / 2),
        (f"{DISTRIBUTED} --ft-snapshot full", 8 / 4, 4 + 8 / 4),  # main parameters are views of them
        (f"{DISTRIBUTED} --bf16 --ft-snapshot full", 12 / 4, 2 + 12 / 4),
        ("--zero-stage 1 --bf16", 12 / 4, 12 / 4),  # the weights are their rounding, here as well
        ("--zero-stage 2", 12 / 4, 12 / 4),
        ("--zero-stage 1 --bf16 --ft-snapshot full", 12 / 4, 2 + 12 / 4),
        ("--zero-stage 2 --ft-snapshot full", 8 / 4, 4 + 8 / 4),
        ("--zero-stage 3 --bf16", 12 / 4, 12 / 4),  # the weights are their rounding
        ("--zero-stage 3", 12 / 4, 12 / 4),
        (f"{DISTRIBUTED} --bf16 --tensor-model-parallel-size 4", 12, 12),  # DP 1: everything
        (f"{DISTRIBUTED} --bf16 --tensor-model-parallel-size 4 --ft-snapshot full", 14, 14),
    ],
)
def test_unique_bytes(flags: str, unique_per_parameter: float, total_per_parameter: float) -> None:
    job = described(GPT2_MEDIUM, flags)
    found = plan(job)
    assert found.unique == pytest.approx(unique_per_parameter * parameters(job), abs=64)
    assert found.nbytes == pytest.approx(total_per_parameter * parameters(job), abs=64)
    assert found.sent_per_rank == pytest.approx(found.unique, abs=64)
    assert found.snapshots_per_rank == 2 * found.nbytes
    # Each node keeps what its predecessor sends, in two slots.
    assert found.memory_per_node == pytest.approx(2 * (found.nbytes + found.unique), abs=512)
    assert found.survives >= 1


def test_replicas_multiply_the_traffic() -> None:
    for kind, segments in ("lean", {3: 4}), ("full", {3: 4, 4: 1}):  # the weights are another one
        flags = f"{DISTRIBUTED} --ft-snapshot {kind}"
        once, twice = (plan(described(GPT2_MEDIUM, flags, f"--ft-replicas {k}")) for k in (1, 2))
        assert twice.sent_per_rank == 2 * once.sent_per_rank
        assert (twice.survives, twice.copies) == (2, segments)


def test_experts_without_data_parallel_peers_are_unique() -> None:
    moe = f"{GPT2_MEDIUM} --num-experts 4 --moe-router-topk 1"
    rows = {row.tensor: row for row in plan(described(moe, "--expert-model-parallel-size 4")).rows}
    assert rows["experts"].unique == rows["experts"].nbytes == 24 * 12 * (8 * 1024**2 + 5 * 1024)
    assert all(row.unique == 0 for name, row in rows.items() if name != "experts")
    pairs = {row.tensor: row for row in plan(described(moe, "--expert-model-parallel-size 2")).rows}
    assert pairs["experts"].unique == 0


def test_peers_on_one_node_are_replicated() -> None:
    """PP 2, DP 4 on nodes of 4: a stage is a node, so its parameters are sent, by one of the four."""
    staged = f"{GPT2_MEDIUM} --world-size 8 --pipeline-model-parallel-size 2"
    found = plan(described(staged, "--nproc-per-node 4"))
    assert found.unique == 0
    assert found.same_domain == 2
    assert found.sent_per_rank == found.nbytes
    assert found.survives == 1
    spread = plan(described(staged))
    assert (spread.sent_per_rank, spread.same_domain, spread.copies) == (0, 0, {4: 2})


def test_one_node_survives_nothing() -> None:
    found = plan(described(GPT2_MEDIUM, DISTRIBUTED, "--nproc-per-node 4"))
    assert (found.survives, found.sent_per_rank) == (0, 0)


def test_free_checkpointing_ratio_is_the_papers() -> None:
    """DBSV / 2F for mixed precision and Adam, here with all parameters taking part in the products."""
    flags = "--bf16 --global-batch-size 64 --position-embedding-type none"
    found = plan(described(GPT2_MEDIUM, DISTRIBUTED, flags))
    dp, per_device, bandwidth, flops = 4, 64 / 4, 400e9 / 8, 100e12
    expected = dp * per_device * 1024 * bandwidth / (2 * flops)
    step = found.compute_seconds(flops)
    assert found.free_checkpointing_ratio(step, bandwidth) == pytest.approx(expected, rel=1e-6)
    assert math.isinf(plan(described(GPT2_MEDIUM)).free_checkpointing_ratio(1.0, bandwidth))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--tensor-model-parallel-size 3", "--world-size"),
        ("--pipeline-model-parallel-size 2 --num-layers 3", "--num-layers"),
        (f"--zero-stage 1 {DISTRIBUTED}", "flags of DeepSpeed and Megatron"),
        ("--num-distributed-optimizer-instances 2", DISTRIBUTED),
        (f"{DISTRIBUTED} --num-distributed-optimizer-instances 3", "instances"),
        ("--num-experts 3 --expert-model-parallel-size 2", "--num-experts"),
        ("--hidden-size 0", "--hidden-size"),
        ("--parameters 7", "more than one model"),
        ("--context-parallel-size 3", "--world-size"),
        ("--num-query-groups 3 --tensor-model-parallel-size 2", "--num-query-groups"),
        ("--ffn-hidden-size 4097 --tensor-model-parallel-size 2", "--ffn-hidden-size"),
        ("--hidden-size 1000 --num-attention-heads 16", "give --kv-channels"),
        ("--num-experts 4 --moe-router-topk 8", "--moe-router-topk 8"),
        ("--global-batch-size 6", "cannot be dealt 4 ways"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size 0: give a number of 1"),
        ("--zero-stage 2 --pipeline-model-parallel-size 2", "--zero-stage 2 with pipeline parallelism"),
    ],
)
def test_flags_that_clash(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(described(GPT2_MEDIUM, flags))


GPT3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 "
    "--world-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --bf16 "
    "--global-batch-size 1536"
)
LLAMA_3_70B = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8 --seq-length 8192 "
    "--ffn-hidden-size 28672 --swiglu --disable-bias-linear --normalization RMSNorm --vocab-size 128256 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
    "--world-size 64 --tensor-model-parallel-size 8"
)


@pytest.mark.parametrize(("flags", "gigabytes"), [(GPT3, 68), (LLAMA_3_70B, 423)])
def test_memory_that_a_node_needs(flags: str, gigabytes: int) -> None:
    """Two snapshots of each of its 8 roles, 12 P / N bytes each, and as much for the copies of others: 48 P a
    node, over N / 8 nodes. The heaviest stage has its share of the embeddings beside that of the layers."""
    found = plan(described(flags, DISTRIBUTED))
    assert round(found.memory_per_node / 1e9) == gigabytes
    parameters_of_all = {GPT3: 174.6e9, LLAMA_3_70B: 70.6e9}[flags]
    nodes = {GPT3: 128, LLAMA_3_70B: 8}[flags]
    assert found.memory_per_node == pytest.approx(48 * parameters_of_all / nodes, rel=0.04)


def test_what_a_node_sends_is_16_f_over_t_bytes_a_second() -> None:
    """F: operations a second of a device; T: tokens of a step."""
    found = plan(described(GPT3, DISTRIBUTED))
    assert found.sent_per_node == pytest.approx(17e9, rel=0.01)
    flops, tokens = 150e12, 1536 * 2048
    # The busiest role multiplies with more parameters than the mean one, where stages are not alike.
    assert found.sent_per_node / found.compute_seconds(flops) == pytest.approx(16 * flops / tokens, rel=0.05)


FLAGS = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257
    --bf16 --use-distributed-optimizer --world-size 64 --global-batch-size 512
    --network-gbps 50 --device-tflops 400 --mtbf-hours 80000"""


def ftctl(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, FRAMEWORKS)
    return command.main(parser.parse_args([*FLAGS.split(), *flags]), FRAMEWORKS)


def test_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftctl() == 0
    text = capsys.readouterr().out
    assert "any 1 lost node at once" in text
    assert "at line rate: a bound, give --measured" in text and "at best every 2 steps" in text
    assert ftctl("--measured", "0.01") == 0
    measured = capsys.readouterr().out
    assert "as measured" in measured and "WARNING: copies take" in measured
    assert "66.54 MB of 66.54 MB (100%)" in text  # 12 / 64 bytes a parameter
    assert ftctl("--ft-snapshot", "full") == 0
    assert "66.54 MB of 776.3 MB (9%)" in capsys.readouterr().out  # of 14 bytes a parameter


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


def test_a_layout_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's flags that lay a model out, without those that describe one, beside DeepSpeed's."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, FRAMEWORKS)
    flags = "--parameters 7000 --world-size 48 --zero-stage 1 --tensor-model-parallel-size 3".split()
    assert command.main(parser.parse_args(flags), FRAMEWORKS) == 2
    said = "--tensor-model-parallel-size: this lays a GPT of Megatron's out; give --num-layers,"
    assert said in capsys.readouterr().err

"""What `ftctl plan` must know of Megatron: its GPT model, its order of ranks, its optimizer's shards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ft_core.cli.planner.shape import Framework, Storage, Tensor, check_batch
from ft_core.errors import ConfigError

EXPERT = "expert"
_LAYOUT = (
    *(f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")),
    "context_parallel_size",
)
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")


@dataclass(frozen=True)
class Gpt:
    """Megatron's GPT model on tensor, pipeline and expert parallel ranks. Raises ConfigError for a clash."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    world_size: int
    ffn_hidden_size: int = 0
    kv_channels: int = 0
    num_query_groups: int = 0
    swiglu: bool = False
    bias: bool = True
    rmsnorm: bool = False
    learned_positions: bool = True
    untied: bool = False
    num_experts: int = 0
    topk: int = 1
    moe_ffn_hidden_size: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    cp: int = 1

    def __post_init__(self) -> None:
        groups = self.num_query_groups or self.num_attention_heads
        for name, value in {
            "--world-size": self.world_size % (self.tp * self.cp * self.pp),
            "--world-size (expert groups)": self.world_size % (self.expert_tp * self.ep * self.pp),
            "--num-layers": self.num_layers % self.pp,
            "--num-attention-heads": self.num_attention_heads % self.tp,
            "--num-query-groups": min(groups % self.tp, self.tp % groups),
            "--ffn-hidden-size": (self.ffn_hidden_size or 4 * self.hidden_size) % self.tp,
            "--num-experts": self.num_experts % self.ep,
        }.items():
            if value:
                raise ConfigError(f"{name} cannot be divided by the parallel sizes given")
        if not self.kv_channels and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} cannot be divided by --num-attention-heads "
                f"{self.num_attention_heads}: give --kv-channels"
            )
        if self.num_experts and self.topk > self.num_experts:
            raise ConfigError(f"--moe-router-topk {self.topk} is more than --num-experts {self.num_experts}")

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.etp or self.tp

    @property
    def stages(self) -> int:
        """How many pipeline stages there are."""
        return self.pp

    def stage(self, role: int) -> int:
        """Megatron's order of ranks is tp-cp-ep-dp-pp: stages are outermost."""
        return role // (self.world_size // self.pp)

    def peers(self, role: int, kind: str) -> Sequence[int]:
        """Roles with the same parameters, or the same experts. Context-parallel ranks are among them."""
        stride = self.expert_tp * self.ep if kind == EXPERT else self.tp
        block = self.world_size // self.pp
        first = role // block * block + role % stride
        return range(first, first + block, stride)

    def tensors(self, stage: int) -> list[Tensor]:
        """Parameters of one rank of pipeline stage `stage`."""
        h, bias, norm = self.hidden_size, int(self.bias), self.hidden_size * (1 if self.rmsnorm else 2)
        layers, first, last = self.num_layers // self.pp, stage == 0, stage == self.pp - 1
        channels = self.kv_channels or h // self.num_attention_heads
        query = channels * self.num_attention_heads
        qkv = query + 2 * channels * (self.num_query_groups or self.num_attention_heads)
        vocab = -(-self.vocab_size // (128 * self.tp)) * 128

        def mlp(ffn: int, tp: int) -> int:
            up = 2 * ffn if self.swiglu else ffn
            return (up * (h + bias) + ffn * h) // tp + bias * h

        found: list[Tensor] = []

        def add(name: str, parameters: int, active: int | None = None, kind: str = "") -> None:
            if parameters:
                found.append(Tensor(name, parameters, parameters if active is None else active, kind))

        if first:
            tied = last and not self.untied
            add("word embeddings", vocab * h, vocab * h if tied else 0)
            add("position embeddings", self.seq_length * h * self.learned_positions, 0)
        add("attention", layers * ((qkv * (h + bias) + query * h) // self.tp + bias * h))
        ffn = self.ffn_hidden_size or 4 * h
        if self.num_experts:
            one = mlp(self.moe_ffn_hidden_size or ffn, self.expert_tp)
            add("router", layers * h * self.num_experts)
            add("experts", layers * self.num_experts // self.ep * one, layers * self.topk * one, EXPERT)
        else:
            add("mlp", layers * mlp(ffn, self.tp))
        add("norms", layers * 2 * norm + (norm if last else 0))
        if last and (self.untied or not first):
            add("output layer", vocab * h)
        return found


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("Megatron's model")
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size"):
        model.add_argument(name, type=int, default=0, metavar="N")
    model.add_argument("--ffn-hidden-size", type=int, default=0, metavar="N", help="default: 4 * hidden size")
    model.add_argument("--kv-channels", type=int, default=0, metavar="N", help="default: hidden size / heads")
    model.add_argument("--num-query-groups", type=int, default=0, metavar="N", help="default: one per head")
    model.add_argument("--swiglu", action="store_true")
    model.add_argument("--disable-bias-linear", action="store_true")
    model.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    kinds = ["learned_absolute", "rope", "none"]
    model.add_argument("--position-embedding-type", choices=kinds, default=kinds[0])
    model.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    model.add_argument("--num-experts", type=int, default=0, metavar="N")
    model.add_argument("--moe-router-topk", type=int, default=2, metavar="N")
    model.add_argument("--moe-ffn-hidden-size", type=int, default=0, metavar="N")

    layout = parser.add_argument_group("Megatron's parallel layout")
    layout.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument("--context-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument("--expert-model-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument(
        "--expert-tensor-parallel-size", type=int, default=0, metavar="N", help="default: as TP"
    )
    layout.add_argument("--use-distributed-optimizer", action="store_true")
    layout.add_argument("--num-distributed-optimizer-instances", type=int, default=1, metavar="N")


def _model(args: argparse.Namespace) -> Gpt | None:
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if getattr(args, name) < 1]
    if missing and all(getattr(args, name) < 1 for name in _NEEDED[:-1]):
        layout = [f"--{name.replace('_', '-')}" for name in _LAYOUT if getattr(args, name) > 1]
        if layout:
            raise ConfigError(
                f"{', '.join(layout)}: this lays a GPT of Megatron's out; give {', '.join(missing)}, which "
                "describe it, or leave it out"
            )
        return None
    if missing:
        raise ConfigError(f"give {', '.join(missing)} too: they say what the model has")
    for name in _LAYOUT:
        if getattr(args, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(args, name)}: give a number of 1 or more")
    model = Gpt(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        seq_length=args.seq_length,
        vocab_size=args.vocab_size,
        world_size=args.world_size,
        ffn_hidden_size=args.ffn_hidden_size,
        kv_channels=args.kv_channels,
        num_query_groups=args.num_query_groups,
        swiglu=args.swiglu,
        bias=not args.disable_bias_linear,
        rmsnorm=args.normalization == "RMSNorm",
        learned_positions=args.position_embedding_type == "learned_absolute",
        untied=args.untie_embeddings_and_output_weights,
        num_experts=args.num_experts,
        topk=args.moe_router_topk,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        cp=args.context_parallel_size,
    )
    check_batch(args.global_batch_size, model.world_size // (model.tp * model.cp * model.pp))
    return model


def _storage(args: argparse.Namespace, usual: Storage) -> Storage | None:
    """Weights follow from the main parameters. A full snapshot keeps them, and beside them no main parameters
    in fp32, which are views of them."""
    instances = args.num_distributed_optimizer_instances
    if instances > 1 and not args.use_distributed_optimizer:
        raise ConfigError("several optimizer instances need --use-distributed-optimizer")
    if not args.use_distributed_optimizer:
        return None
    kept = replace(usual, weights=0, main=4) if args.ft_snapshot == "lean" else usual
    return replace(kept, sharded=True, instances=instances)


FRAMEWORK = Framework("Megatron", _add_arguments, _storage, _model)

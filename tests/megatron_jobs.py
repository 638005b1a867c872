"""Jobs of `megatron.training.pretrain`: the layouts that run on CPU, and what such a job prints and saves.

Needs megatron-core 0.17 to 0.19 with `megatron.training` (Python 3.12, constraints-py312.txt).
"""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import (
    RECIPES,
    Job,
    Result,
    check_clean,
    check_drills,
    check_finite,
    check_survivors,
    environment,
    forks,
    read_logs,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

CPU = (
    "--transformer-impl local --attention-backend unfused --distributed-backend gloo "
    "--use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-dropout-fusion --no-persist-layer-norm"
).split()
"""What Megatron-LM has to be told on a host without GPU, transformer-engine and apex."""

TINY = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0"
).split()
"""A model whose start-up takes longer than its training. A flag given again later wins."""

MOE = (
    "--num-experts=4",
    "--moe-router-topk=2",
    "--moe-router-load-balancing-type=aux_loss",
    "--moe-aux-loss-coeff=1e-2",
    "--moe-token-dispatcher-type=alltoall",
    "--disable-bias-linear",
)


@dataclass(frozen=True)
class Pretrain:
    """A parallel layout of the recipe, of its data and of whatever else `more` asks for."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Virtual pipeline stages per rank."""
    ep: int = 1
    layers: int = 2
    more: tuple[str, ...] = ()
    data: tuple[str, ...] = ("--mock-data",)
    """The flags that name the data; see `indexed`."""
    world: int = 4
    megatron: Path | None = None
    """A directory with another megatron-core than the one that is installed."""

    @property
    def script(self) -> Path:
        return RECIPES[0] / "pretrain_gpt.py"

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        flags = [*CPU, *TINY, f"--num-layers={self.layers}", f"--train-iters={iterations}"]
        flags += [f"--tensor-model-parallel-size={self.tp}", f"--pipeline-model-parallel-size={self.pp}"]
        flags += [f"--num-virtual-stages-per-pipeline-rank={self.vp}"] * (self.vp > 1)
        flags += [f"--expert-model-parallel-size={self.ep}"] * (self.ep > 1)
        return [*flags, *self.data, *self.more, *["--ft"] * protected]

    def environment(self) -> dict[str, str]:
        if self.megatron is None:
            return {}
        return {"PYTHONPATH": f"{self.megatron}:{environment()['PYTHONPATH']}"}


def indexed(prefix: Path) -> tuple[str, ...]:
    """Train on what recipes/megatron/prepare_data.py has written: bytes, and the token 256 after a file.

    At least ten files: Megatron splits by documents, and looks for ever for samples in an empty part.
    """
    return ("--vocab-size=257", "--split=8,1,1", "--data-path", str(prefix))


def validation_sets(prefix: Path) -> tuple[str, ...]:
    """The same data for training, and twice for validation, all of it each time.

    `--full-validation` with a single validation set fails in Megatron 0.19 (`eval_iters[0]` of a number).
    """
    sets = ("--train-data-path", str(prefix), "--valid-data-path", str(prefix), str(prefix))
    return ("--vocab-size=257", *sets, "--multiple-validation-sets", "--full-validation")


ASYNC_SAVE = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy=mcore")
"""Megatron (0.17 to 0.19) saves synchronously without the second, and without the third it wants
nvidia-resiliency-ext."""

DISTOPT = ("--use-distributed-optimizer",)
OVERLAP = (*DISTOPT, "--overlap-grad-reduce", "--overlap-param-gather")
NOT_ON_CPU = {
    "--use-precision-aware-optimizer": "its FusedAdam is transformer-engine's, and Megatron takes no other",
    "--moe-token-dispatcher-type=flex": "DeepEP and HybridEP are CUDA kernels",
    "--moe-grouped-gemm": "the grouped matrix product is a CUDA kernel",
    "--tp-comm-overlap": "it is transformer-engine's",
    "--fp8-format": "it is transformer-engine's",
    "--cuda-graph-impl": "there is no CUDA graph on a CPU",
    "--expert-tensor-parallel-size=2 without a padded capacity": "gloo gathers tensors of one size only",
}
"""What cannot be tried here, and why."""

LAYOUTS: dict[str, Pretrain] = {
    "dp4": Pretrain(),
    "dp4-distopt": Pretrain(more=DISTOPT),
    "tp2": Pretrain(tp=2),
    "pp2": Pretrain(pp=2),
    "tp2pp2": Pretrain(tp=2, pp=2, more=DISTOPT),
    "tp2-sequence": Pretrain(tp=2, more=("--sequence-parallel",)),
    "pp2-interleaved": Pretrain(pp=2, vp=2, layers=4, more=DISTOPT),
    "pp4": Pretrain(pp=4, layers=4),
    "cp2": Pretrain(more=("--context-parallel-size=2",)),
    "ep2": Pretrain(ep=2, more=MOE),
    "ep2-allgather": Pretrain(ep=2, more=(*MOE, "--moe-token-dispatcher-type=allgather")),
    "ep4-distopt": Pretrain(ep=4, more=(*MOE, *DISTOPT)),
    "ep2tp2": Pretrain(tp=2, ep=2, more=(*MOE, "--sequence-parallel", "--expert-tensor-parallel-size=1")),
    "ep2-etp2": Pretrain(
        tp=2,
        ep=2,
        more=(
            *MOE,
            "--sequence-parallel",
            "--expert-tensor-parallel-size=2",
            "--moe-expert-capacity-factor=2",  # gloo gathers tensors of one size only
            "--moe-pad-expert-input-to-capacity",
        ),
    ),
    "ep2pp2-expert-bias": Pretrain(
        pp=2,
        ep=2,
        more=(
            *MOE,
            *DISTOPT,
            "--moe-router-enable-expert-bias",
            "--moe-router-score-function=sigmoid",
            "--moe-router-load-balancing-type=none",
        ),
    ),
    "dp4-instances2": Pretrain(more=(*DISTOPT, "--num-distributed-optimizer-instances=2")),
    "dp4-overlap-grad": Pretrain(more=(*DISTOPT, "--overlap-grad-reduce")),
    "dp4-overlap-param": Pretrain(more=OVERLAP),
    "pp2-interleaved-overlap": Pretrain(pp=2, vp=2, layers=4, more=OVERLAP),
    "dp4-bf16": Pretrain(more=("--bf16",)),
    "dp4-bf16-distopt": Pretrain(more=("--bf16", *DISTOPT)),
    "dp4-bf16-overlap-param": Pretrain(more=("--bf16", *OVERLAP)),
    "tp2pp2-bf16": Pretrain(tp=2, pp=2, more=("--bf16", *DISTOPT)),
    "dp4-fp16": Pretrain(more=("--fp16", "--initial-loss-scale=65536")),
    "dp4-fp16-distopt": Pretrain(more=("--fp16", *DISTOPT, "--initial-loss-scale=65536")),
    "dp4-rampup": Pretrain(more=("--rampup-batch-size", "8", "8", "64", "--global-batch-size=24")),
    "dp4-cyclic": Pretrain(more=("--dataloader-type=cyclic",)),
    "dp4-recompute": Pretrain(
        more=("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
    ),
    "dp4-recompute-selective": Pretrain(more=("--recompute-granularity=selective",)),
    "dp4-evaluation": Pretrain(more=("--eval-interval=2", "--eval-iters=1")),
}


RELEASES = ("0.17.1", "0.18.2")
"""Of megatron-core, beside the one that is installed."""


def installed(release: str, directory: Path) -> Path:
    """That megatron-core, in a directory for PYTHONPATH: it needs nothing else."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={directory}"]
    done = subprocess.run(
        [*command, f"megatron-core=={release}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return directory


# -- what it prints --------------------------------------------------------------------------------

_ITERATION = re.compile(
    r"iteration +(\d+)/ *\d+ \| (consumed samples: +\d+) \|.*?"
    r"(learning rate: .*? number of nan iterations: +\d+) \|"
)
_VALIDATION = re.compile(r"validation\S* loss at (.*? \| lm loss value: \S+)")


def losses(text: str) -> list[tuple[int, str]]:
    """Each line of the training log in its order: the iteration, and all else but how long it took.

    A list, so that an iteration logged twice or not at all is seen. Lines of several ranks may be glued
    together, since a newline is a write of its own; the text of one is whole. All losses are finite.
    """
    check_finite(re.findall(r"lm loss: (\S+)", text))
    return [(int(i), f"{samples} | {rest}") for i, samples, rest in _ITERATION.findall(text)]


def validations(text: str) -> list[str]:
    """Each line about an evaluation, in order: where it was, and its loss. All are finite."""
    check_finite(re.findall(r"lm loss value: (\S+)", text))
    return _VALIDATION.findall(text)


# -- with failures and without ---------------------------------------------------------------------


def survives(
    training: Pretrain,
    iterations: int,
    injected: tuple[str, ...],
    directory: Path,
    *flags: str,
    spares: int = 1,
    ftrun: tuple[str, ...] = (),
) -> Result:
    """Killed in all these places, it logs and saves what it does undisturbed, with all that survived.

    Two nodes of two roles; a killed node is replaced by another when the spares are used up.
    """
    expected, saved = directory / "expected", directory / "saved"
    text = reference(training, iterations, directory / "plain", *flags, "--save", str(expected))
    job_dir, flags = directory / "job", (*flags, "--save", str(saved))
    about = {"ftrun": ("--respawn", *ftrun, "--ft-inject", ",".join(injected)), "flags": flags}
    with Job(job_dir, training, iterations, nproc=2, spares=spares, **about) as job:
        result = job.finish(timeout=240)
    check_log(result, text)
    check_survivors(result, training.world)
    check_drills(result, injected)
    steps = sorted(path.name for path in expected.glob("iter_*"))
    assert (saved / LATEST).read_text() == (expected / LATEST).read_text() == str(iterations)
    for step in steps:
        # One that was written in the background may have been given up, before anything says that it is one.
        if "--async-save" not in training.more or (saved / step / ".metadata").exists():
            compare_checkpoints(expected / step, saved / step)
    check_clean(result)
    return result


def reference(training: Pretrain, iterations: int, directory: Path, *flags: str) -> str:
    """The same training without fault tolerance and without a failure: what its last rank printed."""
    arguments = [*training.arguments(iterations, protected=False), *flags]
    text = forks(training).run(training.script, arguments, training.world, directory)[-1]
    assert [iteration for iteration, _ in losses(text)] == list(range(1, iterations + 1))
    return text


def check_log(result: Result, expected: str) -> None:
    """Every iteration and every evaluation is logged once, and as `expected`, the text of a `reference`."""
    assert result.code == 0, result.output[-4000:]
    assert result.job_dir is not None
    text = read_logs(result.job_dir)
    assert sorted(losses(text)) == losses(expected)
    assert sorted(validations(text)) == sorted(validations(expected))


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """All that tensorboard shows of it, but for what is time: per name, the steps with their values.

    By step: files of writers that begin in the same second are read in the order of their pids as text.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    names = [name for name in events.Tags()["scalars"] if "time" not in name]
    return {name: sorted((event.step, event.value) for event in events.Scalars(name)) for name in names}


# -- what it saves ---------------------------------------------------------------------------------

LATEST = "latest_checkpointed_iteration.txt"
DIFFERENT = {
    "save",
    "load",
    "no_load_optim",
    "no_load_rng",
    "data_cache_path",
    "tensorboard_dir",
    "exit_interval",
    "iteration",
    "num_floating_point_operations_so_far",
    "rank",
    "local_rank",
}
"""Arguments that may differ between two runs of the same training: where it was saved to, by whom, and what
the run began with (what has been reached stands in an entry of its own, which is compared).

Those of fault tolerance, whose names begin with ``ft``, may as well.
"""


def compare_checkpoints(a: Path, b: Path) -> None:
    """Assert that two ``iter_...`` directories hold the same training, bit by bit."""
    left, right = load_checkpoint(a), load_checkpoint(b)
    assert left.keys() == right.keys(), f"in one only: {left.keys() ^ right.keys()}"
    different = [name for name in left if not same(left[name], right[name])]
    assert not different, {name: (left[name], right[name]) for name in different[:3]}
    tensors = [name for name, value in _flat("", left) if isinstance(value, torch.Tensor)]
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert any(name.endswith(kind) or f".{kind}." in name for name in tensors), f"no {kind} in {a}"


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint (torch_dist or torch) by its name, without process groups and Megatron."""
    if files := sorted(path.glob("mp_rank_*/*.pt")):  # format torch
        return {str(file.relative_to(path)): _unpickle(file.read_bytes()) for file in files}
    reader = dcp.FileSystemReader(path)
    contents: dict[str, Any] = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        if isinstance(found, TensorStorageMetadata)
        else None
        for name, found in reader.read_metadata().state_dict_metadata.items()
    }
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(contents, storage_reader=reader, planner=planner, no_dist=True)
    assert all(value is not None for value in contents.values()), (
        f"not read: {[n for n in contents if contents[n] is None]}"
    )
    for file in path.glob("common.pt"):  # until 0.18
        contents[file.name] = _unpickle(file.read_bytes())
    return contents


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, value


def same(a: Any, b: Any) -> bool:
    """Equal bit by bit, but for arguments that may differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, Namespace):
        a, b = (
            {k: v for k, v in vars(x).items() if k not in DIFFERENT and not k.startswith("ft")}
            for x in (a, b)
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, _Foreign):
        return type(a) is type(b) and same((a.args, vars(a)), (b.args, vars(b)))
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    return type(a) is type(b) and bool((a == b) if not hasattr(a, "shape") else (a == b).all())


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = _unpickle(value.getvalue())


class _Foreign:
    """Stands for an object of a class of Megatron's, so that reading does not import it."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __hash__(self) -> int:
        return hash(self.args)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.args == other.args


_foreign: dict[tuple[str, str], type] = {}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("megatron", "ft_megatron", "ft_core"):
            return _foreign.setdefault((module, name), type(name, (_Foreign,), {}))
        return super().find_class(module, name)


def _unpickle(data: bytes) -> Any:
    module = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__=__name__)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=module)

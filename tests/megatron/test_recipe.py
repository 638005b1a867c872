"""The Megatron recipe as an ordinary training script, its data, and the CPU's shadow of torch.cuda."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from harness import RECIPE, ROOT, Layout, check_finite, forks, plain_environment, read_digest

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

PREPARE = ROOT / "recipes" / "megatron" / "prepare_data.py"
TINY = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--seq-length=32", "--train-iters=4"]
SHARED_BATCH = ["--global-batch-size=4", "--attention-dropout=0", "--hidden-dropout=0"]


def python(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )


def flags_of(data: Path, *flags: object) -> list[str]:
    return [*TINY, "--data-path", str(data), *map(str, flags)]


def results(output: str) -> tuple[list[float], str]:
    """Losses of the steps, and the digest of the final state."""
    steps = re.findall(r"^iteration \d+/4 \| loss (\S+) \| lr \S+ \| grad norm \S+ \| \S+ ms$", output, re.M)
    check_finite(steps)
    digest = read_digest(output)
    assert len(steps) == 4 and digest and output.rstrip().endswith(digest), output
    return [float(loss) for loss in steps], digest


def train(data: Path, *flags: object, ranks: int = 1) -> tuple[list[float], str]:
    """As `torchrun` would, in less time."""
    with tempfile.TemporaryDirectory() as logs:
        output = forks(Layout(1, 1, ranks)).run(RECIPE, flags_of(data, *flags), ranks, Path(logs))
    return results("".join(reversed(output)))  # the first rank's at the end, with the digest


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("b.txt", "a.py", "empty.py", "skipped.bin"):
        size = 0 if name == "empty.py" else 3000
        (folder / name).write_text((name * size)[:size])
    return folder


@pytest.fixture(scope="module")
def data(texts: Path) -> Path:
    prefix = texts / "out" / "bytes"
    done = python(PREPARE, "--input", texts, *[texts / "a.py"] * 10, "--output-prefix", prefix)
    assert done.returncode == 0, done.stderr
    assert "12 documents, 36012 tokens" in done.stdout
    return prefix


def test_tokens_are_the_bytes_of_sorted_files(texts: Path, data: Path) -> None:
    tokens = np.fromfile(data.with_suffix(".bin"), dtype=np.uint16)
    assert bytes(tokens[:3000].astype(np.uint8)) == (texts / "a.py").read_bytes()
    assert bytes(tokens[3001:6001].astype(np.uint8)) == (texts / "b.txt").read_bytes()
    assert np.flatnonzero(tokens == 256).tolist() == list(range(3000, 36012, 3001))


def test_data_is_cut_at_the_limit(texts: Path) -> None:
    prefix = texts / "cut"
    done = python(PREPARE, "--input", texts, "--output-prefix", prefix, "--max-megabytes", 0.0031)
    assert "2 documents, 3102 tokens" in done.stdout


def test_equal_runs_end_in_equal_bits(data: Path) -> None:
    flags = ("--use-distributed-optimizer", "--bf16", "--eval-interval", 2, "--split", "80,20,0")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = python(*launcher, RECIPE, *flags_of(data, *flags))
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == train(data, *flags, ranks=2)


def test_tensor_and_pipeline_parallel(data: Path) -> None:
    train(data, "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2, "--fp16", ranks=4)


def test_losses_depend_on_the_seed_and_not_on_the_number_of_ranks(data: Path) -> None:
    alone, digest = train(data, *SHARED_BATCH)
    shared, _ = train(data, *SHARED_BATCH, ranks=2)
    assert shared == pytest.approx(alone, rel=1e-5)

    other, other_digest = train(data, *SHARED_BATCH, "--seed", 5)
    assert other != pytest.approx(alone, rel=1e-5) and other_digest != digest


def test_contradicting_flags_are_refused(data: Path) -> None:
    done = python(RECIPE, "--data-path", data, "--bf16", "--fp16")
    assert done.returncode == 2
    assert "--bf16 and --fp16 exclude each other" in done.stderr


SHADOW = """
from ft_megatron import cpu_shadow
import torch
assert not cpu_shadow.active()
cpu_shadow.install()
cpu_shadow.install()
assert cpu_shadow.active() and torch.cuda.is_available() and not torch.accelerator.is_available()

x = torch.zeros(2, device="cuda:0")
for y in (x, x.cuda(), x.to("cuda", non_blocking=True), x.to(0), x.new_ones(1, device=torch.device("cuda"))):
    assert y.device.type == "cpu"
assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.cuda.FloatTensor)
assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"

torch.manual_seed(3)
state = torch.cuda.get_rng_state()
first = torch.rand(3)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3), first)

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
tracker = CudaRNGStatesTracker()
tracker.add("model-parallel-rng", 7)
torch.cuda.set_rng_state(state)
with tracker.fork():
    inside = torch.rand(3)
assert torch.equal(torch.rand(3), first)  # the fork left the default generator alone
with tracker.fork():
    assert not torch.equal(torch.rand(3), inside)  # and its own went on
"""

LATE = """
import megatron.core
import ft_megatron.cpu_shadow_auto
"""

REAL_DEVICE = """
import torch
torch.cuda.is_available = lambda: True
zeros, stream = torch.zeros, torch.cuda.Stream
import ft_megatron.cpu_shadow_auto
from ft_megatron import cpu_shadow
assert not cpu_shadow.active() and torch.cuda.Stream is stream
"""


STATE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import pretrain_gpt_core as recipe
import torch
from ft_megatron.state import MegatronAdapter

args = recipe.parse_args()
recipe.initialize(args)

def made():
    trainer = recipe.Trainer(args)
    router = trainer.model[0].module
    router.register_buffer("expert_bias", torch.zeros(2, dtype=torch.bfloat16))
    router.register_buffer("local_tokens_per_expert", torch.zeros(2), persistent=False)
    trainer.model[0].config.moe_router_enable_expert_bias = True
    return router, MegatronAdapter(trainer.model, trainer.optimizer, trainer.scheduler)

router, adapter = made()
router.expert_bias.data = torch.tensor([0.1, 0.2])  # fp32, as routers have it from the first forward pass on
held = {t.name: t.tensor.detach().clone() for t in adapter.tensors()}
newcomer, its_adapter = made()
its_adapter.restore(held, adapter.envelope())
assert torch.equal(newcomer.expert_bias, router.expert_bias), newcomer.expert_bias

router.local_tokens_per_expert += 7  # an abandoned forward pass
adapter.reset()
assert not router.local_tokens_per_expert.any()
"""

OVERLAPPED = """
import sys
from types import SimpleNamespace as Some
sys.path.insert(0, sys.argv.pop(1))
import pretrain_gpt_core as recipe
import torch
from megatron.core.transformer.moe import shared_experts
from ft_megatron.state import MegatronAdapter

args = recipe.parse_args()
recipe.initialize(args)
trainer = recipe.Trainer(args)
experts = object.__new__(shared_experts.SharedExpertMLP)
torch.nn.Module.__init__(experts)
experts.config = Some(moe_shared_expert_overlap=True, sequence_parallel=False)
experts.stream, experts.tp_group, experts.use_shared_expert_gate = torch.cuda.Stream(), None, False
if hasattr(shared_experts, "SharedExpertState"):
    experts._overlap_state = shared_experts.SharedExpertState.IDLE
experts.cached_output = None
trainer.model[0].module.experts = experts
adapter = MegatronAdapter(trainer.model, trainer.optimizer, trainer.scheduler)

experts.pre_forward_comm(torch.ones(2, 2))
experts.cached_output = torch.ones(2)  # and the step is abandoned before that is added
try:
    experts.pre_forward_comm(torch.ones(2, 2))
except AssertionError:
    pass
else:
    raise RuntimeError("Megatron looks whether something is left")
adapter.reset()
assert experts.cached_fc1_input is None
experts.pre_forward_comm(torch.ones(2, 2))
"""

CLIPPED = """
import sys
from types import SimpleNamespace as Some
sys.path.insert(0, sys.argv.pop(1))
import pretrain_gpt_core as recipe
from ft_core.worker import session
from ft_megatron.state import MegatronAdapter

args = recipe.parse_args()
recipe.initialize(args)
trainer = recipe.Trainer(args)
session._current = Some(lean=True)
for clips in (False, True):
    trainer.model[0].config.qk_clip = clips
    adapter = MegatronAdapter(trainer.model, trainer.optimizer, trainer.scheduler)
    held = {t.name for t in adapter.tensors() if t.name.startswith("model.")}
    assert held == ({name for name, _ in adapter._parameters()} if clips else set()), held
"""

ANOTHER_MODEL = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import pretrain_gpt_core as recipe
from ft_core.errors import ConfigError
from ft_megatron.state import MegatronAdapter

args = recipe.parse_args()
recipe.initialize(args)

def made(**flags):
    vars(args).update({"num_layers": 2, "ffn_hidden_size": 64, **flags})
    trainer = recipe.Trainer(args)
    return MegatronAdapter(trainer.model, trainer.optimizer, trainer.scheduler)

adapter = made()
for flags in ({}, {"num_layers": 3}, {"num_layers": 1}, {"ffn_hidden_size": 32}):
    other = made(**flags)
    held = {t.name: t.tensor.detach().clone() for t in other.tensors()}
    before = {t.name: t.tensor.detach().clone() for t in adapter.tensors()}
    try:
        adapter.restore(held, other.envelope())
    except ConfigError as error:
        assert flags and "another model or parallel layout" in str(error), (flags, error)
        assert all((t.tensor == before[t.name]).all() for t in adapter.tensors())
    else:
        assert not flags, flags
"""

REFUSED = """
import ft_megatron.cpu_shadow_auto
from types import SimpleNamespace as Some
import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from ft_core.errors import ConfigError
from ft_megatron.state import _check_supported

def fused(dtype):
    return Some(optimizer=Some(name_to_dtype_map={"exp_avg": dtype, "master_param": torch.float32}))

_check_supported(None, [fused(torch.float32)])
for optimizer, part, named in (
    (None, fused(torch.bfloat16), "exp_avg"),
    (object.__new__(LayerWiseDistributedOptimizer), fused(torch.float32), "muon without --use-distributed-"),
):
    try:
        _check_supported(optimizer, [part])
    except ConfigError as error:
        assert named in str(error), error
    else:
        raise AssertionError(named)
"""


def test_router_buffers_are_restored_in_fp32_and_counted_anew(data: Path) -> None:
    done = python("-c", STATE, RECIPE.parent, *TINY, "--data-path", data, "--bf16")
    assert done.returncode == 0, done.stderr


def test_shared_experts_forget_a_step_that_was_abandoned_in_the_dispatcher(data: Path) -> None:
    done = python("-c", OVERLAPPED, RECIPE.parent, *TINY, "--data-path", data)
    assert done.returncode == 0, done.stderr


def test_weights_that_are_clipped_apart_are_held(data: Path) -> None:
    flags = ("--bf16", "--use-distributed-optimizer")
    done = python("-c", CLIPPED, RECIPE.parent, *TINY, "--data-path", data, *flags)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags", [("--bf16",), ("--bf16", "--use-distributed-optimizer"), ()], ids=str)
def test_what_another_model_has_saved_is_refused(flags: tuple[str, ...], data: Path) -> None:
    done = python("-c", ANOTHER_MODEL, RECIPE.parent, *TINY, "--data-path", data, *flags)
    assert done.returncode == 0, done.stderr


def test_state_out_of_reach_is_refused() -> None:
    done = python("-c", REFUSED)
    assert done.returncode == 0, done.stderr


def test_the_shadow_acts_on_the_cpu() -> None:
    done = python("-c", SHADOW)
    assert done.returncode == 0, done.stderr
    assert "CPU RNG state changed" not in done.stderr


def test_the_shadow_must_come_before_megatron() -> None:
    done = python("-c", LATE)
    assert done.returncode == 1
    assert "import ft_megatron.cpu_shadow_auto before anything from megatron" in done.stderr


def test_a_real_device_is_left_alone() -> None:
    done = python("-c", REAL_DEVICE)
    assert done.returncode == 0, done.stderr

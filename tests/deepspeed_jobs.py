"""DeepSpeed trainings for harness.Job: the recipes with a JSON file made for each layout."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT, environment

RECIPES = ROOT / "recipes" / "deepspeed"
SCRIPTS = ROOT / "tests" / "deepspeed" / "scripts"
PLAIN = ROOT / "tests" / "deepspeed" / "plain"
TWICE = 2
"""Lines that a successor repeats at most: a script does not know what its predecessor has printed."""
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data".split()
_configs = tempfile.TemporaryDirectory(prefix="ft-deepspeed-")


@dataclass(frozen=True)
class Zero:
    """Data-parallel training of pretrain_clm.py in one of ZeRO's stages."""

    stage: int
    dp: int = 3
    gas: int = 1
    bf16: bool = False
    fp16: bool = False
    offload: bool = False
    clipping: float = 1.0
    model: str = "gpt2"
    more: tuple[str, ...] = ()
    policy: str = ""

    def __str__(self) -> str:
        kind = "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"
        name = f"zero{self.stage}-dp{self.dp}-gas{self.gas}-{kind}-{self.model}"
        return name + "-offload" * self.offload + f"-clip{self.clipping:g}" + self.policy + "".join(self.more)

    @property
    def world(self) -> int:
        return self.dp

    @property
    def script(self) -> Path:
        return SCRIPTS / "half.py" if self.fp16 else RECIPES / "pretrain_clm.py"

    def config(self) -> dict:
        """The JSON, without our section."""
        # Several buckets, and in stage 3 both kinds of parameters: small ones stay whole on every rank.
        zero: dict = {"stage": self.stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 64, "stage3_prefetch_bucket_size": 10_000}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config = _config(self.gas, self.clipping) | {"zero_optimization": zero}
        if self.bf16:
            config["bf16"] = {"enabled": True}
        if self.fp16:
            # Small enough that the first steps do not all overflow, large enough that the scale moves.
            config["fp16"] = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 4}
        return config

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        config = write_config(str(self), self.config(), protected, self.policy)
        flags = [f"--deepspeed_config={config}", f"--model-type={self.model}", f"--train-iters={iterations}"]
        return [*TINY, *flags, *self.more]

    def environment(self) -> dict[str, str]:
        return variables()


@dataclass(frozen=True)
class Pipeline:
    """Training of pretrain_pipeline.py: data parallelism over pipelines of stages."""

    stages: int = 2
    dp: int = 2
    zero: int = 0
    gas: int = 4
    bf16: bool = False
    more: tuple[str, ...] = ()
    policy: str = ""

    def __str__(self) -> str:
        kind = "bf16" if self.bf16 else "fp32"
        name = f"pp{self.stages}-dp{self.dp}-zero{self.zero}-gas{self.gas}-{kind}"
        return name + self.policy + "".join(self.more)

    @property
    def world(self) -> int:
        return self.stages * self.dp

    @property
    def script(self) -> Path:
        return RECIPES / "pretrain_pipeline.py"

    def config(self) -> dict:
        """The JSON, without our section."""
        config = _config(self.gas, 1.0) | {"zero_optimization": {"stage": self.zero}}
        # The pipeline takes batches of one shape only.
        return config | {"dataloader_drop_last": True, "bf16": {"enabled": self.bf16}}

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        config = write_config(str(self), self.config(), protected, self.policy)
        flags = [f"--deepspeed_config={config}", f"--num-stages={self.stages}"]
        return [*TINY, *flags, f"--train-iters={iterations}", *self.more]

    def environment(self) -> dict[str, str]:
        return variables()


@dataclass(frozen=True)
class HuggingFace:
    """Training of hf_trainer.py in one of ZeRO's stages."""

    stage: int
    dp: int = 3
    gas: int = 1
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"hf-zero{self.stage}-dp{self.dp}-gas{self.gas}" + "".join(self.more)

    @property
    def world(self) -> int:
        return self.dp

    @property
    def script(self) -> Path:
        return RECIPES / "hf_trainer.py"

    def config(self) -> dict:
        """The JSON, without our section: the recipe's own, in this stage."""
        config: dict = json.loads((RECIPES / "ds_hf.json").read_text())
        del config["fault_tolerance"]
        return config | {"zero_optimization": {"stage": self.stage}}

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        config = write_config(str(self), self.config(), protected)
        flags = [f"--deepspeed={config}", f"--max_steps={iterations}", "--save_strategy=no"]
        flags += ["--per_device_train_batch_size=2", f"--gradient_accumulation_steps={self.gas}"]
        flags += ["--learning_rate=1e-3", f"--output_dir={_configs.name}/output"]
        return [*TINY, *flags, *self.more]

    def environment(self) -> dict[str, str]:
        return variables()


@dataclass(frozen=True)
class TrainerLoop(HuggingFace):
    """Training of a script that has state in all sorts of places around the Trainer."""

    data: str = "indexed"
    dp: int = 2

    def __str__(self) -> str:
        return f"trainer-{self.data}-{super().__str__()}"

    @property
    def script(self) -> Path:
        return SCRIPTS / "trainer_loop.py"

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return [*super().arguments(iterations, protected)[len(TINY) :], f"--data={self.data}"]


class OfScript:
    """Training by one of the tests' own scripts."""

    file = ""
    dp: int

    @property
    def world(self) -> int:
        return self.dp

    @property
    def script(self) -> Path:
        return SCRIPTS / self.file

    def config(self) -> dict:
        """The JSON, without our section."""
        raise NotImplementedError

    def flags(self) -> list[str]:
        """What the script is told besides."""
        return []

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        path = write_config(str(self), self.config(), protected)
        return [f"--deepspeed_config={path}", f"--train-iters={iterations}", *self.flags()]

    def environment(self) -> dict[str, str]:
        return variables()


@dataclass(frozen=True)
class EnteredLoop(OfScript):
    """Training of a loop that is entered again after a recovery, in one of ZeRO's stages."""

    file = "entered_loop.py"
    stage: int
    gas: int = 2
    dp: int = 2
    entered: str = ""
    """A file that says with which steps it was entered."""
    checkpoints: str = ""
    """Where it saves every fifth step."""

    def __str__(self) -> str:
        return f"entered-zero{self.stage}-dp{self.dp}-gas{self.gas}"

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        config = _config(self.gas, 1.0) | {"zero_optimization": {"stage": self.stage}}
        section = {"fault_tolerance": {"enabled": True, "in_place": False}} if protected else {}
        path = write_config(str(self) + "-loop" * protected, config | section, protected=False)
        flags = [f"--deepspeed_config={path}", f"--train-iters={iterations}", *["--ft"] * protected]
        if protected:
            flags += [f"--entered={self.entered}"] * bool(self.entered)
            flags += [f"--checkpoints={self.checkpoints}"] * bool(self.checkpoints)
        return flags


@dataclass(frozen=True)
class OwnLoop(OfScript):
    """Training of a script with its own loader, loss, learning rate and collectives."""

    file = "own_loop.py"
    stage: int
    dp: int = 3
    gas: int = 3
    checkpoints: Path | None = None
    seeded: bool = False
    direct: bool = False

    def __str__(self) -> str:
        name = f"own-zero{self.stage}-dp{self.dp}-gas{self.gas}"
        return name + "-seeded" * self.seeded + "-direct" * self.direct

    def config(self) -> dict:
        return _small(self.stage, self.gas)

    def flags(self) -> list[str]:
        flags = [f"--micro-batches={self.gas}", *["--seeded"] * self.seeded, *["--direct"] * self.direct]
        return [*flags, f"--checkpoints={self.checkpoints}"] if self.checkpoints else flags


@dataclass(frozen=True)
class Habits(OfScript):
    """Training of a script that does what scripts do."""

    file = "habits.py"
    stage: int
    dp: int = 2

    def __str__(self) -> str:
        return f"habits-zero{self.stage}"

    def config(self) -> dict:
        return {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
        }


@dataclass(frozen=True)
class Accelerated(OfScript):
    """Training of a loop on accelerate."""

    file = "accelerate_loop.py"
    stage: int
    dp: int = 2

    def __str__(self) -> str:
        return f"accelerate-zero{self.stage}"

    def config(self) -> dict:
        return _small(self.stage, 2) | {"gradient_clipping": 1.0}


@dataclass(frozen=True)
class Quirks(OfScript):
    """Training of a script that has state in all sorts of places."""

    file = "quirks.py"
    gradients: bool = False
    """Whether it changes them between the engine's calls."""
    dp: int = 2

    def __str__(self) -> str:
        return "quirks" + "-gradients" * self.gradients

    def config(self) -> dict:
        return _small(0 if self.gradients else 1, 2)

    def flags(self) -> list[str]:
        return ["--gradients"] * self.gradients


@dataclass(frozen=True)
class WritesState(OfScript):
    """Training of a script that writes weights, buffers and the optimizer's state between steps."""

    file = "writes_state.py"
    stage: int
    only: str = ""
    """What writes; by default all."""
    dp: int = 2

    def __str__(self) -> str:
        return f"writes-state-zero{self.stage}{self.only}"

    def config(self) -> dict:
        return _small(self.stage, stage3_param_persistence_threshold=64)

    def flags(self) -> list[str]:
        return [f"--only={self.only}"] * bool(self.only)


@dataclass(frozen=True)
class Coalesced(OfScript):
    """Training of a script that has the gradients of several micro batches reduced at once."""

    file = "coalesced.py"
    stage: int
    accumulation: int = 1
    dp: int = 2

    def __str__(self) -> str:
        return f"{self.file.removesuffix('.py')}-zero{self.stage}"

    def config(self) -> dict:
        return _small(self.stage, self.accumulation, stage3_param_persistence_threshold=64)


class Unbalanced(Coalesced):
    """Training of a script that has a layer which takes part in every second micro batch."""

    file = "unbalanced.py"


@dataclass(frozen=True)
class Preference(OfScript):
    """Training of a script that has an engine beside the one that it trains."""

    file = "preference.py"
    stage: int
    reference: int
    more: tuple[str, ...] = ()
    dp: int = 2

    def __str__(self) -> str:
        return f"preference-zero{self.stage}-reference{self.reference}" + "".join(self.more)

    def config(self) -> dict:
        return _small(self.stage, stage3_param_persistence_threshold=64)

    def flags(self) -> list[str]:
        return [f"--reference-stage={self.reference}", *self.more]


@dataclass(frozen=True)
class Keeps(OfScript):
    """Training of a script that looks at outputs and at weights."""

    file = "keeps.py"
    more: tuple[str, ...] = ()
    dp: int = 2

    def __str__(self) -> str:
        return "keeps" + "".join(self.more)

    def config(self) -> dict:
        return _small(1)

    def flags(self) -> list[str]:
        return [*self.more]


@dataclass(frozen=True)
class Reads(OfScript):
    """Training of a script that gives what its loader has read to the engine."""

    file = "reads.py"
    stage: int
    kind: str = "plain"
    workers: int = 0
    read_on: Path | None = None
    dp: int = 2

    def __str__(self) -> str:
        return f"reads-{self.kind}-zero{self.stage}-workers{self.workers}"

    def config(self) -> dict:
        return _small(self.stage) | {"train_micro_batch_size_per_gpu": 4}

    def flags(self) -> list[str]:
        return [
            f"--kind={self.kind}",
            f"--workers={self.workers}",
            *[f"--file={self.read_on}"] * bool(self.read_on),
        ]


@dataclass(frozen=True)
class Phases(OfScript):
    """Training of a script that makes a second engine when it is done with the first."""

    file = "phases.py"
    checkpoints: Path
    dies_at: int = 0
    first: int = 6
    dp: int = 2

    def __str__(self) -> str:
        return "phases"

    def config(self) -> dict:
        return _small(1) | {"train_micro_batch_size_per_gpu": 8}

    def flags(self) -> list[str]:
        return [f"--checkpoints={self.checkpoints}", f"--first={self.first}", f"--dies-at={self.dies_at}"]


@dataclass(frozen=True)
class Resumes(OfScript):
    """Training of a script that resumes from a file of its own."""

    file = "resumes.py"
    own: Path
    dp: int = 2

    def __str__(self) -> str:
        return "resumes"

    def config(self) -> dict:
        return _small(0)

    def flags(self) -> list[str]:
        return [f"--own={self.own}"]


def variables(*first: Path) -> dict[str, str]:
    """A job's environment, with these folders where Python looks first."""
    path = [*map(str, first), str(PLAIN), environment()["PYTHONPATH"]]
    # Without torch's compiler, which nothing here uses, DeepSpeed is imported in three quarters of the time.
    return {"DS_ACCELERATOR": "cpu", "PYTHONPATH": ":".join(path), "TORCHDYNAMO_DISABLE": "1"}


def write_config(name: str, config: dict, protected: bool, policy: str = "") -> Path:
    """The file of that configuration, with our section or without."""
    if protected:
        section = {"enabled": True, "replicas": 1} | ({"policy": policy} if policy else {})
        config = config | {"fault_tolerance": section}
    path = Path(_configs.name) / f"{name}{'-protected' * protected}.json".replace("/", "_")
    path.write_text(json.dumps(config, indent=2))
    return path


def _config(gas: int, clipping: float) -> dict:
    adam = {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}
    decay = {"warmup_max_lr": 1e-3, "warmup_num_steps": 4, "total_num_steps": 100, "warmup_type": "linear"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupDecayLR", "params": decay},
    }


def _small(stage: int, gas: int = 1, **zero: int) -> dict:
    """That of a script with an optimizer of its own."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }

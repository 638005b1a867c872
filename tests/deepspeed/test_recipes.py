"""The DeepSpeed recipes as ordinary training scripts: nothing of ours takes part."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from deepspeed_jobs import RECIPES, HuggingFace, Pipeline, Zero
from harness import Result, Training, check_finite, read_digest, read_losses, torchrun, undisturbed

if importlib.util.find_spec("deepspeed") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("deepspeed or transformers is not installed", allow_module_level=True)

STEPS = 7
# Ranks come to a second epoch on the way, after a batch that is not full; step 5 is not an epoch's last.
SMALL = ("--train-samples=13", "--valid-samples=6")
EVALUATE = "--eval-interval=3"  # a resumed run does so too: the loader draws from the same random numbers


def shipped(name: str, flag: str = "--deepspeed_config") -> tuple[str]:
    """The flag that takes a recipe's own JSON, which the last one given wins."""
    return (f"{flag}={RECIPES / name}",)


def train(training: Training, *flags: str) -> Result:
    """Some steps with two validations."""
    result = undisturbed(training, STEPS, *SMALL, *flags)
    assert set(result.losses) == set(range(1, STEPS + 1)) and result.digest
    validations = re.findall(r"validation after (\d+)/\d+ \| loss (\S+)", result.output)
    assert [step for step, _ in validations[:2]] == ["3", "6"]
    check_finite(loss for _, loss in validations)
    return result


def check_resumed(rest: Result, whole: Result) -> None:
    """The steps after a checkpoint are those of the run that was not interrupted."""
    assert rest.losses == {step: loss for step, loss in whole.losses.items() if step > 5}
    assert rest.digest == whole.digest


@pytest.mark.parametrize(
    ("name", "model"),
    [("zero0", "gpt2"), ("zero1", "llama"), ("zero2", "llama"), ("zero2_offload", "gpt2"), ("zero3", "gpt2")],
)
def test_zero(name: str, model: str, tmp_path: Path) -> None:
    # Three ranks do not divide the parameters: ZeRO-3 pads them with memory that nobody sets.
    dp = 3 if name == "zero3" else 2
    training = Zero(int(name[4]), dp=dp, model=model, more=shipped(f"ds_{name}.json"))
    save = (f"--save={tmp_path}", "--save-interval=5", EVALUATE)
    whole = train(training, *save)
    if name == "zero2":
        output = torchrun(training, training.script, STEPS, *SMALL, *save)
        assert (read_losses(output), read_digest(output)) == (whole.losses, whole.digest), "forks are alike"
    if name == "zero3":
        check_resumed(undisturbed(training, STEPS, *SMALL, EVALUATE, f"--load={tmp_path}"), whole)


def test_pipeline(tmp_path: Path) -> None:
    training = Pipeline(dp=1, more=(*shipped("ds_pipeline.json"), "--tie-embeddings"))
    whole = train(training, f"--save={tmp_path}", "--save-interval=5", EVALUATE)
    check_resumed(undisturbed(training, STEPS, *SMALL, EVALUATE, f"--load={tmp_path}"), whole)


def test_hugging_face(tmp_path: Path) -> None:
    evaluate = ("--eval_strategy=steps", "--eval_steps=3", f"--output_dir={tmp_path}")
    training = HuggingFace(2, dp=2, more=shipped("ds_hf.json", "--deepspeed") + evaluate)
    whole = train(training, "--save_strategy=steps", "--save_steps=5")
    rest = undisturbed(training, STEPS, *SMALL, f"--resume_from_checkpoint={tmp_path}/checkpoint-5")
    check_resumed(rest, whole)


def test_every_configuration_asks_for_fault_tolerance() -> None:
    configs = sorted(RECIPES.glob("ds_*.json"))
    assert len(configs) == 7
    for path in configs:
        section = json.loads(path.read_text())["fault_tolerance"]
        assert section == {"enabled": True, "replicas": 1, "spares": 1}, path


def test_no_recipe_knows_of_the_plugin() -> None:
    for path in RECIPES.glob("*.py"):
        assert not re.search(r"^\s*(import|from) ft_", path.read_text(), re.M), path


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes_deepspeed_corpus", RECIPES / "corpus.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_are_the_bytes_of_sorted_files(corpus: ModuleType, tmp_path: Path) -> None:
    for name, text in (("b.txt", "bb"), ("a.py", "aaa"), ("empty.py", ""), ("skipped.bin", "s")):
        (tmp_path / name).write_text(text)
    assert corpus.read_text([tmp_path], 100).tolist() == [97, 97, 97, 256, 98, 98, 256]
    assert corpus.read_text([tmp_path, tmp_path / "b.txt"], 4).tolist() == [97, 97, 97, 256, 98, 256]
    with pytest.raises(ValueError, match="no text found"):
        corpus.read_text([tmp_path / "empty.py"], 100)


def test_samples_are_consecutive_pieces(corpus: ModuleType) -> None:
    samples = corpus.Samples(np.arange(11, dtype=np.uint16), 4)
    assert len(samples) == 2
    assert samples[1]["input_ids"].tolist() == samples[1]["labels"].tolist() == [4, 5, 6, 7]

"""The JSON section: what is wrong with it is said with the full key and the fix."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, environment

from ft_core.errors import ConfigError
from ft_core.settings import FLAGS
from ft_deepspeed import arguments, config

FULL = {
    "enabled": True,
    "replicas": 2,
    "spares": 1,
    "policy": "stop",
    "durable": {"interval": 500, "dir": "/shared/ckpt"},
    "lr_intervention": "linear",
    "ready_standbys": 1,
    "snapshot": "full",
    "every": 4,
    "in_place": False,
}
AUTO = {
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": "auto", "zero_quantized_weights": "auto"},
    "fp16": {"enabled": "auto"},
}


def of(section: Any, **others: Any) -> config.FaultTolerance | None:
    return config.parse({"train_batch_size": 8, **others, "fault_tolerance": section})


def test_section():
    found = of(FULL, **AUTO)
    assert found is not None and found.lr_intervention == "linear"
    settings = found.settings()
    assert settings == {
        "replicas": 2,
        "spares": 1,
        "policy": "stop",
        "lr_intervention": "linear",
        "ready_standbys": 1,
        "snapshot": "full",
        "every": 4,
        "durable_dir": "/shared/ckpt",
        "durable_interval": 500,
    }
    assert set(settings) == set(FLAGS) - {"stages"}, "the model's, which the engine knows"


def test_what_the_section_leaves_out_is_left_to_the_flags():
    found = of({})
    assert found is not None and found.enabled and found.settings() == {"every": 1}
    assert (found.replicas, found.spares, found.policy, found.durable) == (1, 0, "wait", None)
    assert (found.lr_intervention, found.snapshot) == ("sqrt", "lean")
    found = of({"enabled": True, "replicas": 1})
    assert found is not None and found.settings() == {"replicas": 1, "every": 1}
    assert (found := of({"in_place": False})) is not None and found.settings() == {}


def test_a_relative_directory_is_where_the_job_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    found = of({"durable": {"interval": 1, "dir": "ckpt"}})
    assert found is not None and found.settings()["durable_dir"] == str(tmp_path.resolve() / "ckpt")


def test_nothing_to_do():
    assert config.parse({}) is None
    assert config.parse(AUTO) is None
    assert of({"enabled": False, "replicas": 3}) is None
    assert of({"enabled": False}, elasticity={"enabled": True}) is None


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"replica": 1}, 'fault_tolerance.replica: unknown key; did you mean "replicas"?'),
        ({"colour": 1}, "fault_tolerance.colour: unknown key; there are enabled, replicas, spares"),
        (
            {"durable": {"interval": 1, "dir": "d", "every": 1}},
            "fault_tolerance.durable.every: unknown key; there are interval, dir",
        ),
        (
            {"durable": {"Interval": 1, "dir": "d"}},
            'fault_tolerance.durable.Interval: unknown key; did you mean "interval"?',
        ),
        ({"replicas": "1"}, "fault_tolerance.replicas must be a whole number, 0 or more"),
        ({"replicas": True}, "fault_tolerance.replicas must be a whole number"),
        ({"replicas": 1.0}, "fault_tolerance.replicas must be a whole number"),
        ({"replicas": None}, "fault_tolerance.replicas must be a whole number"),
        ({"replicas": "auto"}, "fault_tolerance.replicas must be a whole number"),
        ({"replicas": -1}, "fault_tolerance.replicas must be a whole number, 0 or more"),
        ({"spares": -1}, "fault_tolerance.spares must be a whole number, 0 or more"),
        ({"spares": [1]}, "fault_tolerance.spares must be a whole number"),
        ({"enabled": 1}, "fault_tolerance.enabled must be true or false, got 1"),
        ({"enabled": "true"}, "fault_tolerance.enabled must be true or false"),
        ({"policy": "grow"}, 'fault_tolerance.policy must be "wait", "shrink" or "stop", got "grow"'),
        ({"lr_intervention": None}, 'fault_tolerance.lr_intervention must be "sqrt", "linear" or "none"'),
        ({"snapshot": "small"}, 'fault_tolerance.snapshot must be "lean" or "full", got "small"'),
        ({"durable": "/shared"}, 'fault_tolerance.durable must be an object like {"interval": 500'),
        ({"durable": {"interval": 5}}, "fault_tolerance.durable.interval needs fault_tolerance.durable.dir"),
        ({"durable": {"dir": "d"}}, "fault_tolerance.durable.dir needs fault_tolerance.durable.interval"),
        ({"durable": {}}, "fault_tolerance.durable needs fault_tolerance.durable.interval"),
        ({"durable": {"interval": 0, "dir": "d"}}, "fault_tolerance.durable.interval must be a whole"),
        ({"durable": {"interval": True, "dir": "d"}}, "fault_tolerance.durable.interval must be"),
        ({"durable": {"interval": 1, "dir": ""}}, "fault_tolerance.durable.dir must be a directory"),
        ({"durable": {"interval": 1, "dir": 3}}, "fault_tolerance.durable.dir must be a directory"),
        ({"enabled": False, "replicas": -1}, "fault_tolerance.replicas must be"),
        (True, 'fault_tolerance must be an object like {"enabled": true}, got true'),
        (None, "fault_tolerance must be an object"),
    ],
)
def test_wrong_sections(section: Any, said: str):
    with pytest.raises(ConfigError) as wrong:
        of(section)
    assert str(wrong.value).startswith(said)


def test_what_was_found_is_shown():
    with pytest.raises(ConfigError, match=r'at once, got "1"$'):
        of({"replicas": "1"})


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as wrong:
        of({"replicas": "1", "policy": "x"})
    assert "fault_tolerance.replicas" in str(wrong.value) and "fault_tolerance.policy" in str(wrong.value)


@pytest.mark.parametrize("name", ["fault_tolerence", "fault-tolerance", "faultTolerance", "Fault_Tolerance"])
def test_a_misspelt_section(name: str):
    with pytest.raises(ConfigError, match=f'{name}: unknown section; did you mean "fault_tolerance"'):
        config.parse({name: {}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_optimization.offload_optimizer.device", "nvme"),
        ("zero_optimization.offload_param.device", "nvme"),
        ("zero_optimization.zero_hpz_partition_size", 8),
        ("zero_optimization.mics_shard_size", 4),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.zero_quantized_nontrainable_weights", True),
        ("zero_optimization.zero_quantized_gradients", True),
        ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
        ("compile.deepcompile", True),
        ("optimizer.type", "OneBitAdam"),
        ("optimizer.type", "OneBitLamb"),
        ("optimizer.type", "ZeroOneAdam"),
        ("optimizer.type", "Muon"),
        ("zero_optimization.offload_optimizer.ratio", 0.4),
        ("zero_optimization.offload_optimizer.ratio", "0.4"),
        ("zero_optimization.offload_optimizer.super_offload", True),
        ("zero_optimization.zero_hpz_partition_size", 2.0),
        ("amp.enabled", True),
        ("hybrid_engine.enabled", True),
        ("elasticity.enabled", True),
        ("nebula.enabled", True),
    ],
)
def test_what_cannot_be_protected(key: str, value: Any):
    *path, last = key.split(".")
    others: dict[str, Any] = {last: value}
    for part in reversed(path):
        others = {part: others}
    with pytest.raises(ConfigError) as wrong:
        of({}, **others)
    assert str(wrong.value).startswith(f"{key} {json.dumps(value)} cannot go with fault_tolerance: ")
    assert of({"enabled": False}, **others) is None and config.parse(others) is None


def test_what_can_be_protected():
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
        "zero_hpz_partition_size": 1,
        "mics_shard_size": -1,
        "zero_quantized_weights": False,
        "zenflow": None,
    }
    others = {
        "compile": {"deepcompile": False},
        "elasticity": {"enabled": False},
        "optimizer": {"type": "Adam"},
    }
    assert of({}, zero_optimization=zero, **others) is not None
    assert of({}, zero_optimization=True, optimizer=None) is not None


def test_read(tmp_path: Path):
    given = {"train_batch_size": 8, "fault_tolerance": {"replicas": 1}}
    assert config.read(given) is given
    path = tmp_path / "ds.json"
    path.write_text("{\n  # as DeepSpeed reads it, with a comment\n  train_batch_size: 8\n"
                    '  "fault_tolerance": {"replicas": 1}\n}\n')  # fmt: skip
    for form in (path, str(path), base64.urlsafe_b64encode(json.dumps(given).encode()).decode()):
        found = config.read(form)
        assert found == given
        assert config.parse(found) == config.FaultTolerance(replicas=1)
    assert config.parse(OrderedDict(fault_tolerance=OrderedDict(replicas=1))) == config.FaultTolerance(
        replicas=1
    )


def test_read_nothing(tmp_path: Path):
    path = tmp_path / "ds.json"
    with pytest.raises(ConfigError, match="is neither a file nor a base64-encoded configuration"):
        config.read(path)
    for text in ("[1]", '{"a": '):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"{path} is no DeepSpeed configuration: "):
            config.read(path)
    with pytest.raises(ConfigError, match="is no DeepSpeed configuration"):
        config.read(tmp_path)


def test_arguments(tmp_path: Path):
    path = tmp_path / "ds.json"
    inline = json.dumps({"fault_tolerance": FULL})
    path.write_text(inline)
    settings = of(FULL).settings()  # type: ignore[union-attr]
    for given in (
        ["--lr", "1", "--deepspeed_config", str(path)],
        ["--deepspeed-config", str(path), "--lr", "1"],
        [f"--deepspeed_config={path}"],
        ["--deepspeed", "--deepspeed_config", str(path)],
        ["--deepspeed_config", base64.urlsafe_b64encode(inline.encode()).decode()],
        ["--deepspeed", str(path)],
        [f"--deepspeed={path}"],
        ["--deepspeed", inline],
    ):
        assert arguments.settings(given) == settings, given
    for given in (
        [],
        ["--deepspeed"],
        ["--deepspeed_config"],
        ["--deepspeed", "--lr", "1"],
        ["--deepspeed", "corpus.txt"],
        ["--deepspeed_config", str(tmp_path / "elsewhere.json")],
        ["--config", str(path)],
    ):
        assert arguments.settings(given) == {}, given
    path.write_text('{"fault_tolerance": {"enabled": false}}')
    assert arguments.settings(["--deepspeed", str(path)]) == {}
    path.write_text('{"fault_tolerance": {"replica": 1}}')
    with pytest.raises(ConfigError, match=f'--deepspeed {path}: fault_tolerance.replica: .*"replicas"'):
        arguments.settings(["--deepspeed", str(path)])


def test_a_file_that_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "ds.json"
    assert arguments.settings(["--deepspeed", str(path)]) == {}
    assert f"--deepspeed {path}: there is no such file here; the script has to make it" in caplog.text
    caplog.clear()
    path.write_text("{}")
    assert arguments.settings(["--deepspeed", str(path)]) == {} and not caplog.text


def test_a_script_that_is_protected_as_it_is_does_one_step_again_at_most():
    """What it writes and prints in a step is its own, and would be done as often as the step."""
    with pytest.raises(ConfigError, match="in_place"):
        of({"every": 2})
    found = of({"every": 2, "in_place": False})
    assert found is not None and found.settings() == {"every": 2}


def test_deepspeed_is_not_imported_to_read_it(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{"fault_tolerance": {"replicas": 1}}')
    code = f"""
import sys
from ft_deepspeed import arguments
assert arguments.settings(['train.py']) == {{}} and 'pydantic' not in sys.modules
assert arguments.settings(['--deepspeed', {str(path)!r}]) == {{'replicas': 1, 'every': 1}}
assert not {{'deepspeed', 'torch'}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment())

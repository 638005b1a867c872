"""`--ft` among a Megatron script's arguments: for `ftrun`, and in Megatron's own parser; what is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from harness import ROOT, settings_of

from ft_core.cli import launch
from ft_core.errors import ConfigError
from ft_core.settings import FLAGS, Settings
from ft_megatron import arguments, versions

MEGATRON = "--num-layers 2 --lr 1e-3 --tokenizer-type NullTokenizer".split()

needs_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="no megatron.training: it comes with megatron-core 0.17 and Python 3.12",
)


def standalone(*command: str) -> Settings:
    return settings_of("--standalone", "--nnodes=3", *command)


# -- for ftrun -------------------------------------------------------------------------------------


def test_flags():
    given = "--ft --ft-replicas 2 --ft-spares=1 --ft-policy stop"
    found = arguments.settings([*MEGATRON, *given.split(), "--bf16"])
    assert found == {"replicas": 2, "spares": 1, "policy": "stop"}
    assert found.keys() < FLAGS.keys()


def test_the_order_of_ranks():
    """A job that starts with some replica groups must know where they are before Megatron does."""
    pipeline = ["--ft", "--pipeline-model-parallel-size=2"]
    assert arguments.settings(pipeline) == {"stages": 2}
    assert arguments.settings([*pipeline, "--use-tp-pp-dp-mapping"]) == {}
    command = ["--standalone", "--nnodes=2:4", "--ft-policy=shrink", __file__, *pipeline]
    some = settings_of(*command)
    assert some.start.present == [0, 2]
    other = settings_of(*command, "--use-tp-pp-dp-mapping")
    assert other.start.present == [0, 1]


def test_the_defaults_need_no_more_than_the_switch():
    assert arguments.settings(MEGATRON) == arguments.settings([*MEGATRON, "--ft"]) == {}
    assert standalone(__file__, *MEGATRON, "--ft").replicas == 1


def test_ftrun_starts_what_the_script_asks_for():
    found = standalone(__file__, *MEGATRON, "--ft", "--ft-replicas", "2", "--ft-spares", "1")
    assert (found.replicas, found.spares, found.given) == (2, 1, [])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--ft-replicas 1", ["--ft-replicas does nothing without --ft"]),
        ("--ft --ft-replicas two", ["--ft-replicas", "two"]),
        ("--ft --ft-policy panic", ["policy", "panic", "wait or shrink or stop"]),
        ("--ft --ft-replicas 3", ["replicas", "3 needs 4 nodes"]),
        ("--ft --ft-replicas 1", ["--ft-replicas 2 of ftrun contradicts", "which says replicas 1"]),
        ("--ft --enable-ft-package", ["--enable-ft-package cannot go with --ft", "leave it out"]),
        ("--ft --inprocess-restart", ["--inprocess-restart cannot go with --ft"]),
        (
            "--ft --use-megatron-fsdp --perform-rl-step",
            ["--use-megatron-fsdp cannot go", "--perform-rl-step cannot go"],
        ),
    ],
)
def test_ftrun_refuses(flags: str, named: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    job_dir = tmp_path / "job"
    own = ["--ft-replicas=2"] if "contradicts" in named[0] else []
    command = ["--standalone", "--nnodes=3", *own, f"--job-dir={job_dir}", __file__, *MEGATRON]
    assert launch.main([*command, *flags.split()]) == 2
    error = capfd.readouterr().err
    assert error.startswith("ftrun: ") and all(text in error for text in named)
    assert not job_dir.exists()


def test_nothing_is_refused_without_protection():
    assert arguments.settings([*MEGATRON, "--enable-ft-package", "--inprocess-restart"]) == {}


# -- the YAML file ---------------------------------------------------------------------------------


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    pytest.importorskip("yaml")
    return tmp_path / "gpt.yaml"


def from_yaml(path: Path, section: Any, *flags: str) -> dict[str, Any]:
    """JSON is YAML."""
    path.write_text(json.dumps({"lr": 0.001, "fault_tolerance": section}))
    return arguments.settings(["--yaml-cfg", str(path), *flags])


def test_yaml(yaml_file: Path):
    assert from_yaml(yaml_file, {"replicas": 2, "policy": "stop"}) == {"replicas": 2, "policy": "stop"}
    assert from_yaml(yaml_file, {"enabled": False, "replicas": 2}) == {}
    assert from_yaml(yaml_file, None, "--ft", "--ft-spares=1") == {"spares": 1}
    assert from_yaml(yaml_file, {"replicas": 2}, "--ft-spares=1") == {"replicas": 2, "spares": 1}


@pytest.mark.parametrize(
    ("section", "flags", "named"),
    [
        ({"replica": 1}, "", r"fault_tolerance\.replica: unknown key; did you mean replicas\?"),
        ({"colour": 1}, "", r"fault_tolerance\.colour: unknown key; there are enabled, replicas, spares"),
        ({"replicas": "1"}, "", r"fault_tolerance\.replicas must be a whole number, got '1'"),
        ({"enabled": 1}, "", r"fault_tolerance\.enabled must be true or false, got 1"),
        (True, "", "fault_tolerance must be a mapping"),
        ({"replicas": 1}, "--ft-replicas=2", r"--ft-replicas 2 contradicts fault_tolerance\.replicas 1"),
        ({"enabled": False}, "--ft", r"--ft contradicts fault_tolerance\.enabled false"),
        ({"enabled": False}, "--ft-spares=1", "--ft-spares does nothing without --ft"),
    ],
)
def test_wrong_yaml(section: Any, flags: str, named: str, yaml_file: Path):
    with pytest.raises(ConfigError, match=named):
        from_yaml(yaml_file, section, *flags.split())


def test_no_yaml(yaml_file: Path):
    with pytest.raises(ConfigError, match=r"--yaml-cfg .*gpt.yaml cannot be read"):
        arguments.settings(["--ft", "--yaml-cfg", str(yaml_file)])


# -- what cannot go with it, as Megatron has validated it ------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("non_persistent_ckpt_type", "local", "--non-persistent-ckpt-type"),
        ("fault_injector_ranks", "1,2", "--fault-injector-ranks"),
        ("fault_injector_num_ranks", 1, "--fault-injector-num-ranks"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
        ("nccl_ub", True, "--use-nccl-ub"),
        ("fp8", "hybrid", "--fp8-recipe"),
        ("use_torch_fsdp2", True, "--use-torch-fsdp2"),
        ("optimizer_cuda_graph", True, "--optimizer-cuda-graph"),
        ("fim_data", True, "--fim-data"),
        ("defer_embedding_wgrad_compute", True, "--defer-embedding-wgrad-compute"),
        ("gtp_weight_remat_size", 2, "--tensor-parallel-num-weight-shards"),
        ("expert_gtp_weight_remat_size", 2, "--expert-tensor-parallel-num-weight-shards"),
        ("moe_router_force_biased", -1.0, "--moe-router-force-biased"),
        ("overlap_param_gather", True, "--qk-clip"),
        ("moe_use_upcycling", True, "--moe-use-upcycling"),
        ("logits_load_dir", "logits", "--logits-load-dir"),
        ("logits_save_dir", "logits", "--logits-save-dir"),
        ("dataloader_save", "places", "--dataloader-save"),
        ("moe_routing_trace_path", "trace", "--moe-routing-trace-path"),
    ],
)
def test_refused(name: str, value: Any, flag: str):
    default = {"cuda_graph_impl": "none", "fp8": None, "fp8_recipe": "delayed", "nccl_ub": False}
    default |= {"logits_load_dir": None, "dataloader_save": "", "qk_clip": True}
    fine = {**default, "non_persistent_ckpt_type": "global", "use_distributed_optimizer": True}
    arguments.check(SimpleNamespace(**fine))
    with pytest.raises(ConfigError, match=f"^{flag} cannot go with --ft: .*; or leave --ft out"):
        arguments.check(SimpleNamespace(**{**fine, name: value}))


# -- Megatron's own parser -------------------------------------------------------------------------

PARSE = """
import contextlib, io, json, sys
from pathlib import Path
from types import SimpleNamespace
import ft_megatron.hooks  # as patches/*.diff do
from ft_core.worker import session
from ft_core.errors import ConfigError
import megatron.core
from megatron.training import arguments, global_vars

found = {}

def said(*flags, role=None):
    sys.argv = ["pretrain_gpt.py", *flags]
    brought = []
    session._current = role if role is None else SimpleNamespace(
        role=role, configure=brought.append, started_over=False, job_dir=Path(), secret=b"s")
    try:
        args = arguments.parse_args()
        global_vars.set_args(args)
    except ConfigError as error:
        return f"ConfigError: {error}"
    return [args.ft, brought]

shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    sys.argv = ["pretrain_gpt.py", "--help"]
    arguments.parse_args()
found["help"] = shown.getvalue()
found["off"] = said("--bf16", role=0)
found["on"] = said("--ft", "--ft-spares", "1", role=0)
found["torchrun"] = said("--ft")
found["refused"] = said("--ft", "--use-nccl-ub", role=0)
found["yaml"] = said("--yaml-cfg", sys.stdin.read(), "--ft-spares=1", role=0)
found["missing"] = ft_megatron.hooks._missing
found["version"] = megatron.core.__version__
json.dump(found, open("found.json", "w"))
"""


@needs_training
def test_megatrons_own_parser(tmp_path: Path):
    yaml_cfg = tmp_path / "gpt.yaml"
    about = {"enable_msc": False, "disable_msc_deprecated": False, "fault_tolerance": {"replicas": 0}}
    yaml_cfg.write_text(json.dumps(about))
    has_yaml = importlib.util.find_spec("yaml") is not None
    script = PARSE if has_yaml else "".join(line for line in PARSE.splitlines(True) if "yaml" not in line)
    environment = {**os.environ, "FT_CPU_SHADOW": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        input=str(yaml_cfg),
        text=True,
        check=True,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    group = found["help"].partition("fault tolerance:\n")[2]
    assert group.split()[0] == "--ft" and all(f"--ft-{name}" in group for name in ("replicas", "spares"))
    assert found["off"] == [False, []]
    assert found["on"] == [True, [{"spares": 1}]]
    assert found["torchrun"].startswith("ConfigError: --ft needs ftrun in place of torchrun")
    assert found["refused"].startswith("ConfigError: --use-nccl-ub cannot go with --ft")
    assert found["missing"] == [] and versions._minor(found["version"]) in versions.KNOWN
    if has_yaml:
        assert found["yaml"] == [True, [{"replicas": 0, "spares": 1}]]


# -- versions, and patches/ -------------------------------------------------------------------------


def test_an_unknown_version(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for version in ("0.16.1", "0.17.1", "0.18.2", "0.19.2"):
            versions.warn_unknown(version)
        assert not caplog.records
        versions.warn_unknown("0.20.0rc1")
    (record,) = caplog.records
    said = record.getMessage()
    assert "0.20.0rc1" in said and "0.16 to 0.19" in said and all(name in said for name in versions.RELIED_ON)
    assert versions.for_version("0.20.0") == versions.for_version("0.19.2") != versions.for_version("0.17.1")


def test_what_a_version_lacks():
    training = ModuleType("training")
    for name, parameters in versions.RELIED_ON.items():
        exec(f"def {name}({', '.join([*parameters.split(), 'new=None'])}): ...", vars(training))
    assert versions.missing(training) == []
    exec("def train_step(model, data_iterator): ...", vars(training))
    del training.train  # type: ignore[attr-defined]
    gone, changed = versions.missing(training)
    assert gone == "there is no train"
    assert changed.startswith("train_step begins with (model, data_iterator), not with (forward_step_func,")


@pytest.mark.parametrize("version", versions.KNOWN[1:])
def test_the_diff_for_those_who_edit(version: str, tmp_path: Path):
    diff = ROOT / "patches" / f"megatron-{version}.diff"
    lines = diff.read_text().splitlines()
    hunk = lines[next(n for n, line in enumerate(lines) if line.startswith("@@")) :]
    removed, added = ([line[1:] for line in hunk if line[0] == sign] for sign in "-+")
    assert len(removed) + len(added) <= 5 and len(hunk) == 1 + len(removed) + len(added)
    assert "import ft_megatron.hooks" in added[0] and added[1:] == removed
    before = int(hunk[0].split()[1].lstrip("-").split(",")[0]) - 1
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("\n" * before + "\n".join([*removed, "train()"]) + "\n")
    # Git looks for a repository above, and would take the paths for that one's.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", "--unidiff-zero", str(diff)], cwd=tmp_path, env=environment, check=True)
    assert script.read_text().split("\n")[before:] == [*added, "train()", ""]


def test_a_newcomer_needs_no_job_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It may be deleted by then; all workers log to one run of Weights & Biases all the same."""
    from ft_megatron import hooks

    found: list[dict[str, str]] = []
    for name, value in (("of", {}), ("check", None)):
        monkeypatch.setattr(arguments, name, lambda args, value=value: value)
    monkeypatch.setattr(hooks, "_missing", [])
    for secret in (b"of the job", b"of the job", b"of another"):
        about = {"role": 1, "configure": lambda settings: None, "started_over": False}
        worker = SimpleNamespace(**about, secret=secret, job_dir=tmp_path / "deleted")
        monkeypatch.setattr("ft_core.worker.session.current", lambda worker=worker: worker)
        monkeypatch.setattr(os, "environ", {})
        hooks._configure(SimpleNamespace())
        found.append(dict(os.environ))
    assert found[0] == found[1] != found[2] and found[0]["WANDB_RUN_ID"]

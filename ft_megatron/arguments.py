"""`--ft` and the flags that go with it, for Megatron's own parser and for `ftrun`; the same in its YAML.

`ftrun` imports this module whatever the script is, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ft_core import refusals
from ft_core.elastic.rules import INTERVENTIONS
from ft_core.errors import ConfigError
from ft_core.refusals import Refusal
from ft_core.settings import POLICIES, SNAPSHOTS

SECTION = "fault_tolerance"
GROUP = "fault tolerance"
NOT_ASKED = "--ft is not among Megatron's arguments"

_FLAGS: dict[str, tuple[type, str]] = {
    "replicas": (int, "nodes that may be lost at once without losing state (default 1)"),
    "spares": (int, "nodes that stand by; ftrun --standalone starts them (default 0)"),
    "policy": (str, f"with no spare left: {', '.join(POLICIES)} (default wait, for a node to join)"),
    "lr_intervention": (
        str,
        f"learning rate while replica groups are away, with policy shrink: {', '.join(INTERVENTIONS)} "
        "(default sqrt)",
    ),
    "snapshot": (
        str,
        f"{' or '.join(SNAPSHOTS)}: whether weights that follow from the distributed optimizer's shards are "
        "left out of the copies of the state (default lean)",
    ),
    "every": (int, "steps from a protected version to the next (default -1: as copies keep up)"),
}
"""The type and purpose of each of `ft_core.settings.FLAGS`. The durable tier is Megatron's `--save`."""


def add_to(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group to a parser: Megatron's own, so that its `--help` shows it."""
    group = parser.add_argument_group(GROUP)
    group.add_argument(
        "--ft", action="store_true", help="recover from failures in place, from the same step; needs ftrun"
    )
    for name, (kind, about) in _FLAGS.items():
        # The defaults are the engine's: what is None here was not given.
        group.add_argument(_flag(name), type=kind, default=None, help=about)
    return parser


def settings(arguments: list[str]) -> dict[str, Any]:
    """Settings (`ft_core.settings.FLAGS`) that `--ft` flags among a script's arguments bring.

    Empty when there is nothing to say about them. Raises ConfigError naming flag or key, and the fix.
    """
    flags = _given(arguments)
    found = _combined(flags, _load(flags.yaml_cfg) if flags.yaml_cfg else None)
    if found is None:
        return {}
    check(flags)  # of Megatron's flags, the switches; the others when Megatron has read them
    # Megatron's order of ranks has the pipeline outermost, with the other mapping the replica groups.
    stages = 1 if flags.use_tp_pp_dp_mapping else flags.pipeline_model_parallel_size
    return {**found, "stages": stages} if stages > 1 else found


def of(args: Any) -> dict[str, Any] | None:
    """What `settings` says, from Megatron's validated arguments; None when they do not ask for protection.

    Raises ConfigError where flags and YAML contradict each other.
    """
    if getattr(args, "yaml_cfg", None) is None:
        return _combined(args, None)
    # Megatron has dropped its command line for the file; `--ft` and its values hold beside either.
    section = getattr(args, SECTION, None)
    return _combined(_given(sys.argv[1:]), vars(section) if isinstance(section, SimpleNamespace) else section)


def _given(arguments: list[str]) -> argparse.Namespace:
    """The flags of `add_to`, and those of Megatron's that matter before it has read them itself."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_to(parser).add_argument("--yaml-cfg", default=None)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from None


def _combined(flags: Any, section: Any) -> dict[str, Any] | None:
    """What flags and the YAML file's section say together; None when neither asks for protection."""
    values = {name: value for name in _FLAGS if (value := getattr(flags, f"ft_{name}", None)) is not None}
    on = bool(getattr(flags, "ft", False))
    if section is not None:
        keys = _checked(section)
        enabled = keys.pop("enabled", True)
        if on and not enabled:
            raise ConfigError(f"--ft contradicts {SECTION}.enabled false in the YAML file: leave one out")
        for name in keys.keys() & values.keys():
            if keys[name] != values[name]:
                raise ConfigError(
                    f"{_flag(name)} {values[name]} contradicts {SECTION}.{name} {keys[name]} in the YAML "
                    "file: leave one of the two out, or make them equal"
                )
        if enabled:
            return {**keys, **values}
    if on:
        return values
    if values:
        raise ConfigError(f"{_flag(next(iter(values)))} does nothing without --ft: add --ft, or leave it out")
    return None


def _flag(name: str) -> str:
    return f"--ft-{name.replace('_', '-')}"


def _checked(section: Any) -> dict[str, Any]:
    """The keys of the YAML file's section; their values' ranges are the engine's to check."""
    if not isinstance(section, dict):
        raise ConfigError(f"{SECTION} must be a mapping like {{enabled: true}}, got {section!r}")
    if problems := list(_problems(section)):
        raise ConfigError("; ".join(problems))
    return dict(section)


def _problems(section: dict[str, Any]) -> Iterator[str]:
    types = {"enabled": bool, **{name: kind for name, (kind, _) in _FLAGS.items()}}
    for key, value in section.items():
        kind = types.get(key)
        if kind is None:
            near = difflib.get_close_matches(str(key).lower(), types, n=1)
            known = f"did you mean {near[0]}?" if near else f"there are {', '.join(types)}"
            yield f"{SECTION}.{key}: unknown key; {known}"
        elif type(value) is not kind:  # not isinstance: true is no number
            yield f"{SECTION}.{key} must be {_NAMES[kind]}, got {value!r}"


_NAMES = {bool: "true or false", int: "a whole number", str: "a string"}


def _load(path: str) -> Any:
    """The section in a YAML file, or None. Raises ConfigError for a file that cannot be read as one."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"--yaml-cfg {path} cannot be read without PyYAML: pip install pyyaml") from None
    try:
        found = yaml.safe_load(Path(path).read_text())  # as Megatron reads it
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--yaml-cfg {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--yaml-cfg {path} is no configuration: it holds no mapping")
    return found.get(SECTION)


# -- what Megatron can do and a recovery could not restore -----------------------------------------


def check(args: Any) -> None:
    """Raise ConfigError for arguments that cannot go with `--ft`: it names each, why, and what to do.

    `args`: Megatron's; one that its version does not have is not asked for.
    """
    refusals.check(_REFUSED, args, "--ft", "leave --ft out")


def _refused(flag: str, why: str, refuses: Callable[[Any], bool]) -> Refusal:
    """`refuses`: asked with Megatron's arguments."""
    return Refusal(lambda args: flag if refuses(args) else "", why)


def _is(name: str, *values: Any) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, None) in values


def _given_as(name: str) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, None) is not None


def _is_on(*names: str) -> Callable[[Any], bool]:
    return lambda args: any(getattr(args, name, False) for name in names)


def _more(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


RIVALS = ("--enable-ft-package", "--inprocess-restart")
_RIVAL = "it restarts workers by rules of its own, also in a recovery; leave it out, ftrun does its work"
_SHARDS = "weights keep handles of exchanges that an abandoned step has begun; leave it out"
_FSDP = "its shards are not restored; leave it out, and shard the optimizer by --use-distributed-optimizer"
_OFFLOAD = "what an abandoned step has offloaded would be taken for the next one's; leave it out"
_SWITCHES = {
    **dict.fromkeys(RIVALS, _RIVAL),
    "--use-megatron-fsdp": _FSDP,
    "--use-torch-fsdp2": _FSDP,
    "--optimizer-cpu-offload": "the state of its optimizers on both devices is not restored; leave it out",
    "--optimizer-cuda-graph": "a captured step cannot be left half-way; leave it out",
    "--fp8-param-gather": "scales of parameters kept in fp8 are not restored; leave it out",
    "--fp4-param-gather": "scales of parameters kept in fp4 are not restored; leave it out",
    "--tp-comm-overlap": "Transformer Engine's userbuffers hold communicators of their own, which no "
    "recovery opens again; leave it out",
    "--delay-wgrad-compute": "gradients that a step has put off would be left in Transformer Engine's queue; "
    "leave it out",
    "--fine-grained-activation-offloading": _OFFLOAD,
    "--fim-data": "its data sets draw from generators of their own as they are read, so a newcomer would "
    "read other samples; leave it out, and prepare the data so",
    "--defer-embedding-wgrad-compute": "gradients that an abandoned step has put off would be paired with "
    "the next one's; leave it out",
    "--perform-rl-step": "rollouts and their inference engine are not restored; leave it out",
    "--moe-use-upcycling": "a newcomer would convert the dense model once more, over the checkpoint; convert "
    "in a job of its own, then train without it",
}
"""Those that `ftrun` sees, too, before Megatron has read its arguments."""
_REFUSED = (
    *(
        _refused(flag, why, _is_on(flag.removeprefix("--").replace("-", "_")))
        for flag, why in _SWITCHES.items()
    ),
    _refused(
        "--fault-injector-ranks",
        "who takes the role over injects the same fault again; use ftrun --ft-inject",
        _given_as("fault_injector_ranks"),
    ),
    _refused(
        "--fault-injector-num-ranks",
        "who takes a role over injects the same fault again; use ftrun --ft-inject",
        _given_as("fault_injector_num_ranks"),
    ),
    _refused(
        "--non-persistent-ckpt-type",
        "local checkpoints do not go with a role to another node, and the agents hold and replicate newer "
        "copies in memory; leave it out with --replication, or give global",
        _is("non_persistent_ckpt_type", "local"),
    ),
    _refused(
        "--cuda-graph-impl",
        "captured graphs hold the communicators that a recovery replaces; leave it out, or give none",
        lambda args: getattr(args, "cuda_graph_impl", None) not in (None, "none"),
    ),
    _refused(
        "--use-nccl-ub",
        "buffers are registered with the communicators that a recovery replaces; leave it out",
        _is("nccl_ub", True),
    ),
    _refused(
        "--fp8-recipe",
        "the history that delayed scaling keeps in Transformer Engine is not restored; "
        "give tensorwise, blockwise or mxfp8",
        lambda args: bool(getattr(args, "fp8", None)) and getattr(args, "fp8_recipe", None) == "delayed",
    ),
    _refused(
        "--moe-token-dispatcher-type",
        "the flex dispatcher keeps buffers and handles of its peers (DeepEP, HybridEP), which would be those "
        "of lost ones; give alltoall",
        _is("moe_token_dispatcher_type", "flex"),
    ),
    _refused("--cpu-offloading-num-layers", _OFFLOAD, _is_on("cpu_offloading_num_layers")),
    _refused(
        "--te-rng-tracker",
        "Transformer Engine's random states are not restored; leave it out",
        _is_on("te_rng_tracker", "use_te_rng_tracker"),
    ),
    _refused("--tensor-parallel-num-weight-shards", _SHARDS, _more("gtp_weight_remat_size")),
    _refused("--expert-tensor-parallel-num-weight-shards", _SHARDS, _more("expert_gtp_weight_remat_size")),
    _refused(
        "--moe-router-force-biased",
        "a bias below 0 is drawn once a process, and a newcomer would draw another; leave it out",
        lambda args: (getattr(args, "moe_router_force_biased", None) or 0) < 0,
    ),
    _refused(
        "--qk-clip",
        "with --overlap-param-gather weights are clipped before the next step gathers them, and could not be "
        "made of the shards; leave one of the two out",
        lambda args: getattr(args, "qk_clip", False) and getattr(args, "overlap_param_gather", False),
    ),
    _refused(
        "--logits-load-dir",
        "its place in the teacher's logits is not restored, so that a step done again would read others; "
        "leave it out",
        _is_on("logits_load_dir"),
    ),
    _refused(
        "--logits-save-dir",
        "what an abandoned step has gathered would be saved as the next one's; leave it out",
        _is_on("logits_save_dir"),
    ),
    _refused(
        "--dataloader-save",
        "what the script's loader says of its place is not asked for; leave it out, a recovery finds the "
        "place by drawing",
        _is_on("dataloader_save"),
    ),
    _refused(
        "--moe-routing-trace-path",
        "who takes a role over begins its trace anew, over what its predecessor has written; leave it out",
        _is_on("moe_routing_trace_path"),
    ),
)

"""The section `fault_tolerance` of a DeepSpeed configuration: what it may say, and what cannot go with it."""

from __future__ import annotations

import base64
import difflib
import json
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import hjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ft_core import refusals
from ft_core.errors import ConfigError
from ft_core.refusals import Refusal

SECTION = "fault_tolerance"
Json = dict[str, Any]


class _Strict(BaseModel):
    # A field's description says what a value must be, as an error message goes on after "must be".
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Durable(_Strict):
    """`fault_tolerance.durable`: checkpoints on storage, written by the agents while training goes on."""

    interval: int = Field(ge=1, description="a whole number of steps, 1 or more")
    """Steps from one to the next."""
    dir: str = Field(min_length=1, description='a directory that all nodes see, such as "/shared/ckpt"')
    """Where they are written; a new job with the same directory starts from the newest complete one."""


class FaultTolerance(_Strict):
    """The section `fault_tolerance` of a DeepSpeed configuration. A key that it does not have is an error.

    A value of the wrong type is one, too: `"1"` is no number, and neither is `true`.
    """

    enabled: bool = Field(True, description="true or false")
    """False trains without protection, as if there were no section."""
    replicas: int = Field(1, ge=0, description="a whole number, 0 or more: nodes that may be lost at once")
    """k: how many failure domains may be lost at once without losing state."""
    spares: int = Field(0, ge=0, description="a whole number, 0 or more: nodes that stand by")
    """Nodes without a role, imports done; `ftrun --standalone` starts them."""
    policy: Literal["wait", "shrink", "stop"] = Field("wait", description='"wait", "shrink" or "stop"')
    """With no spare left: wait for a node to join, go on without the replica group, or end the job."""
    durable: Durable | None = Field(
        None, description='an object like {"interval": 500, "dir": "/shared/ckpt"}; leave it out for none'
    )
    """Checkpoints on storage; none without it."""
    lr_intervention: Literal["sqrt", "linear", "none"] = Field(
        "sqrt", description='"sqrt", "linear" or "none"'
    )
    """What the learning rate does while replica groups are away, see `ft_core.elastic.rules.lr_factor`."""
    snapshot: Literal["lean", "full"] = Field("lean", description='"lean" or "full"')
    """Whether copies of the state leave out weights that follow from the optimizer's main parameters."""

    in_place: bool = Field(True, description="true or false")
    """Whether the script is protected as it is. False: its loop does it by `ft_deepspeed.training`."""
    every: int = Field(-1, ge=-1, description="a whole number of steps, or -1: as copies keep up")
    """Steps from a version that is protected to the next; 1 where the script is protected in place."""
    ready_standbys: int = Field(
        0, ge=-1, description="a whole number: standbys of each node that are ready, or -1: as memory allows"
    )
    """Roles of each node that a standby has started ahead of need; -1: as many as there is memory for."""

    def settings(self) -> Json:
        """What the engine must know, by its own names (`ft_core.settings.FLAGS`).

        Only what the section says: for the rest the flags of `ftrun` hold, and their defaults.
        """
        found = self.model_dump(
            include={
                "replicas",
                "spares",
                "policy",
                "lr_intervention",
                "ready_standbys",
                "snapshot",
                "every",
            },
            exclude_unset=True,
        )
        if self.in_place:
            found["every"] = 1  # what a script does between its engine's calls is not done again
        if self.durable is not None:
            found["durable_dir"] = str(Path(self.durable.dir).resolve())
            found["durable_interval"] = self.durable.interval
        return found


def parse(config: Json) -> FaultTolerance | None:
    """The section of a configuration; None without one, or with `"enabled": false`.

    Raises ConfigError naming the key and the fix.
    """
    if SECTION not in config:
        _reject_misspelt(config)
        return None
    try:
        section = FaultTolerance.model_validate(config[SECTION])
    except ValidationError as error:
        # A misspelt key first: it is why another is missing.
        found = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise ConfigError("; ".join(_explain(dict(e)) for e in found)) from None
    if not section.enabled:
        return None
    if section.in_place and section.every > 1:
        raise ConfigError(
            f"{SECTION}.every {section.every}: a script that is protected as it is would do again what it "
            "has done outside of DeepSpeed in several finished steps; leave it out, or have a loop of your "
            'own ("in_place": false)'
        )
    check(config)
    return section


def absence(config: Json | str | os.PathLike[str] | None) -> str:
    """Why `parse` has found no section in it."""
    if config is None:
        return "deepspeed.initialize was given no configuration"
    file = "the DeepSpeed configuration"
    if isinstance(config, (str, os.PathLike)) and os.path.exists(config):
        file = f"the DeepSpeed configuration {os.fspath(config)}"
    return (
        f'{file} has "enabled": false in {SECTION}'
        if SECTION in read(config)
        else f"{file} has no {SECTION} section"
    )


def read(config: Json | str | os.PathLike[str]) -> Json:
    """A configuration as DeepSpeed takes it: a dict, a path, or base64 of JSON. Raises ConfigError."""
    found = config if isinstance(config, dict) else load(os.fspath(config))
    if found is None:
        raise ConfigError(f"{str(config)[:80]!r} is neither a file nor a base64-encoded configuration")
    return found


def load(text: str) -> Json | None:
    """The configuration behind a path, or in `text` itself: JSON, or base64 of it. None if it is neither.

    Raises ConfigError for a file that cannot be read as one.
    """
    if os.path.exists(text):
        try:
            found = hjson.loads(Path(text).read_text())  # as DeepSpeed reads it: comments are allowed
        except (OSError, ValueError) as error:
            raise ConfigError(f"{text} is no DeepSpeed configuration: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{text} is no DeepSpeed configuration: it holds no JSON object")
        return found
    try:
        inline = text.lstrip().startswith("{")
        found = hjson.loads(text if inline else base64.urlsafe_b64decode(text).decode())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _reject_misspelt(config: Json) -> None:
    """DeepSpeed ignores sections it does not know, so a job would be unprotected without a word."""
    for key in config:
        plain = str(key).lower().replace("-", "_")
        if difflib.get_close_matches(plain, [SECTION], cutoff=0.8):
            raise ConfigError(f'{key}: unknown section; did you mean "{SECTION}"?')


def _explain(error: Json) -> str:
    """One of pydantic's errors in our words: the full key, what is wrong, what to write."""
    *path, last = (str(part) for part in (SECTION, *error["loc"]))
    key, kind = ".".join([*path, last]), error["type"]
    if not path:
        return f'{key} must be an object like {{"enabled": true}}, got {_show(error["input"])}'
    model = Durable if len(path) > 1 else FaultTolerance
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(last.lower(), model.model_fields, n=1)
        known = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(model.model_fields)}"
        return f"{key}: unknown key; {known}"
    must = model.model_fields[last].description
    if kind == "missing":
        given = [f"{'.'.join(path)}.{name}" for name in error["input"] if name in model.model_fields]
        return f"{' and '.join(given) or '.'.join(path)} needs {key} as well: {must}"
    return f"{key} must be {must}, got {_show(error['input'])}"


def _show(value: Any) -> str:
    return json.dumps(value, default=repr)


# -- what DeepSpeed can do and a recovery could not restore ----------------------------------------


def check(config: Json) -> None:
    """Raise ConfigError for what cannot go with the section: it names each key, why, and what to do."""
    refusals.check(_REFUSED, config, SECTION, f"set {SECTION}.enabled to false")


def _refused(keys: str, refuses: Callable[[Any], bool], why: str) -> Iterator[Refusal]:
    """`refuses`: given the value of a key."""

    def asked(key: str, config: Json) -> str:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return f"{key} {_show(value)}" if value is not None and refuses(value) else ""

    return (Refusal(partial(asked, key), why) for key in keys.split())


# Values as DeepSpeed's own models read them; "auto" is none.


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "1.0", "yes", "y", "on", "t")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _named(*names: str) -> Callable[[Any], bool]:
    return lambda value: str(value).lower() in names


_REFUSED = (
    *_refused(
        "zero_optimization.offload_optimizer.device zero_optimization.offload_param.device",
        _named("nvme"),
        'state on NVMe is not copied to other nodes; offload to "cpu"',
    ),
    *_refused(
        "zero_optimization.offload_optimizer.super_offload",
        _is_on,
        "it steps in another process; leave it out, or set false",
    ),
    *_refused(
        "zero_optimization.zero_hpz_partition_size",
        lambda value: _number(value) > 1,
        "secondary partitions (ZeRO++) are not restored; leave it out, or set 1",
    ),
    *_refused(
        "zero_optimization.mics_shard_size",
        lambda value: _number(value) > 0,
        "MiCS shards are not restored; leave it out, or set -1",
    ),
    *_refused(
        "zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights "
        "zero_optimization.zero_quantized_gradients",
        _is_on,
        "quantized communication (ZeRO++) is not covered; leave it out, or set false",
    ),
    *_refused(
        "zero_optimization.zenflow",
        lambda value: True,
        "ZenFlow updates parameters outside the step; leave it out",
    ),
    *_refused(
        "compile.deepcompile",
        _is_on,
        "DeepCompile takes the gradient exchange out of the engine's reach; set false",
    ),
    *_refused(
        "optimizer.type",
        _named("onebitadam", "onebitlamb", "zerooneadam"),
        "its error feedback differs on each rank and is not restored; use Adam, AdamW or Lamb",
    ),
    *_refused(
        "optimizer.type",
        lambda value: "muon" in str(value).lower(),
        "Muon changes its momentum before the step, which a failure then could not undo; use AdamW",
    ),
    *_refused(
        "zero_optimization.offload_optimizer.ratio",
        lambda value: _number(value) < 1,
        "one of two optimizers would step before a failure could be noticed; leave it out, or set 1",
    ),
    *_refused(
        "elasticity.enabled",
        _is_on,
        "DeepSpeed's elasticity restarts the job with another batch size; set false",
    ),
    *_refused(
        "nebula.enabled",
        _is_on,
        f"Nebula takes checkpoints over; set false, and use {SECTION}.durable",
    ),
    *_refused("amp.enabled", _is_on, 'use "fp16", "bf16" or "torch_autocast"'),
    *_refused("hybrid_engine.enabled", _is_on, "generation rearranges the weights; set false"),
    # Where these are on, and how, depends on the version: an engine that was made says it so.
    *_refused("quantize_training", _is_on, "its quantization schedule is not covered; leave it out"),
    *_refused("compression_training", _is_on, "its schedules are not covered; leave it out"),
)

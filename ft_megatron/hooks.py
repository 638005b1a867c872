"""Where fault tolerance enters Megatron-LM: its parser, its arguments and its training loop.

All is patched at run time, no file of Megatron's is changed. The hooks are in place before the user's script
runs, and do nothing until its arguments say `--ft`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ft_core.import_hook import after_import
from ft_megatron import patched, versions

CPU_SHADOW_ENV = "FT_CPU_SHADOW"
"""Set to 1, an unmodified script runs on a machine without a GPU (tests, demonstrations)."""


def install() -> None:
    """Patch Megatron-LM, each of its modules as soon as it is imported. May be called again."""
    if os.environ.get(CPU_SHADOW_ENV) == "1":
        from ft_megatron import cpu_shadow

        cpu_shadow.install()
    after_import("megatron.training.arguments", _patch_arguments)
    after_import("megatron.training.global_vars", _patch_global_vars)
    after_import(versions.TRAINING, _patch_training)
    after_import("megatron.core.datasets.blended_megatron_dataset_builder", _patch_datasets)
    for entry in versions.ENTRIES:
        after_import(entry.module, _patch_version)


def _patch_version(module: ModuleType) -> None:
    for entry in versions.for_version(_version()):
        if entry.module == module.__name__:
            entry.apply(module)


def _version() -> str:
    return str(importlib.import_module("megatron.core.package_info").__version__)


def _patch_arguments(module: ModuleType) -> None:
    from ft_megatron import arguments

    def adding(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parser: arguments.add_to(original(parser))

    patched.ADD_ARGUMENTS.wrap(adding, of=module)


def _patch_global_vars(module: ModuleType) -> None:
    """Megatron calls `set_args` once, when all is validated, whether flags or YAML brought it.

    It is the one place that every version passes and that nobody holds by another name; where `validate_args`
    is called differs, and modules that a fork server has preloaded hold it from before.
    """

    def configuring(original: Callable[..., None]) -> Callable[..., None]:
        def set_args(args: Any) -> None:
            _configure(args)
            original(args)

        return set_args

    patched.SET_ARGS.wrap(configuring, of=module)


def _configure(args: Any) -> None:
    """Raises ConfigError for what the arguments ask for and cannot have, before anything is set up."""
    from ft_core.errors import ConfigError
    from ft_core.worker import session
    from ft_megatron import arguments, progress_log

    settings = arguments.of(args)
    args.ft = settings is not None  # whatever said it, flag or YAML
    if settings is None:
        return
    current = session.current()
    if current is None:
        raise ConfigError(
            "--ft needs ftrun in place of torchrun (it takes torchrun's flags): nothing would protect this "
            "job; or leave --ft out"
        )
    arguments.check(args)
    if _missing:
        raise ConfigError(
            f"--ft cannot hook Megatron-Core {_version()}: in {versions.TRAINING} {'; '.join(_missing)}; "
            f"use a version from {versions.KNOWN[1]} to {versions.KNOWN[-1]}, or leave --ft out"
        )
    if current.role == 0:
        versions.warn_unknown(_version())
    current.configure(settings)
    progress_log.one_run(current.secret)
    if current.started_over:
        _resume(args)


def _resume(args: Any) -> None:
    """Memory did not suffice, and the job has started over: go on from what Megatron saved last, in full."""
    if args.save and (Path(args.save) / "latest_checkpointed_iteration.txt").exists():
        args.load = args.save
        args.ckpt_step = None
        for part in ("finetune", "no_load_optim", "no_load_rng"):
            if getattr(args, part, None):
                setattr(args, part, False)


def _patch_datasets(module: ModuleType) -> None:
    """Megatron's loaders come later: what takes long is to make indices, or to read them."""
    from ft_core.process.timeline import timeline

    def marking(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*args: Any, **kwargs: Any) -> Any:
            if timeline.running:  # no step was done yet
                timeline.mark("data")
            return original(*args, **kwargs)

        return build

    patched.BUILD_DATA.wrap(marking, once=True)


_missing: list[str] = []
"""Why the training loop is not hooked, when it is not. That matters to nobody who does not ask for `--ft`."""


def _patch_training(module: ModuleType) -> None:
    _missing[:] = versions.missing(module)
    if _missing:
        return
    from ft_megatron import pretrain

    pretrain.install(module)


install()  # who imports this module, as `ftrun` does before it imports what the script does, wants the hooks

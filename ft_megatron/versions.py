"""What differs between versions of Megatron for the hooks of `ft_megatron`, and what they rely on in all.

The hooks take what they patch by name and pass on whatever they are given, so that most differences do not
matter. An entry is for one that does.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ft_megatron import patched

log = logging.getLogger(__name__)

KNOWN = ("0.16", "0.17", "0.18", "0.19")
"""Minor versions that were tried. In 0.16 the wheel has no `megatron.training`: there is nothing to hook."""


@dataclass(frozen=True)
class Entry:
    """One difference: minor versions that have it, what is done about it, why, and how."""

    versions: tuple[str, ...]
    module: str
    what: str
    reason: str
    apply: Callable[[ModuleType], None]


def for_version(version: str) -> tuple[Entry, ...]:
    """The entries that a version like 0.19.2 needs; an unknown one needs those of the newest."""
    minor = _minor(version)
    return tuple(entry for entry in ENTRIES if (minor if minor in KNOWN else KNOWN[-1]) in entry.versions)


def warn_unknown(version: str) -> None:
    """Log a warning, for a version that was not tried, that names what was checked instead."""
    if _minor(version) not in KNOWN:
        log.warning(
            "Megatron-Core %s was not tried with --ft (%s to %s were). Checked was that %s still has what "
            "the hooks rely on, with the parameters they expect: %s",
            *(version, KNOWN[0], KNOWN[-1], TRAINING, ", ".join(RELIED_ON)),
        )


TRAINING = "megatron.training.training"
RELIED_ON: dict[str, str] = {
    "train": "forward_step_func model optimizer opt_param_scheduler train_data_iterator valid_data_iterator "
    "process_non_loss_data_func config checkpointing_context non_loss_data_func",
    "train_step": "forward_step_func data_iterator model optimizer opt_param_scheduler config "
    "forward_backward_func iteration",
    "training_log": "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag "
    "skipped_iter grad_norm params_norm num_zeros_in_grad max_attention_logit",
    "evaluate": "forward_step_func data_iterator model process_non_loss_data_func config verbose",
    "evaluate_and_print_results": "prefix forward_step_func data_iterator model iteration "
    "process_non_loss_data_func config verbose write_to_tensorboard non_loss_data_func",
    "save_checkpoint_and_time": "iteration model optimizer opt_param_scheduler "
    "num_floating_point_operations_so_far checkpointing_context non_persistent_ckpt train_data_iterator",
    "save_checkpoint": "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far "
    "checkpointing_context",
    "checkpoint_and_decide_exit": "model optimizer opt_param_scheduler iteration "
    "num_floating_point_operations_so_far checkpointing_context train_data_iterator",
    "load_checkpoint": "ddp_model optimizer opt_param_scheduler",
    "build_pretraining_data_loader": "dataset consumed_samples",
    "finalize_model_grads": "model num_tokens pg_collection",
    "update_num_microbatches": "consumed_samples consistency_check verbose",
    "print_rank_last": "message",
    "get_args": "",
    "get_timers": "",
    "get_tensorboard_writer": "",
    "get_wandb_writer": "",
    "get_model_config": "model",
    "get_rerun_state_machine": "",
    "write_args_to_tensorboard": "",
}
"""Functions in `megatron.training.training`, its own and imported ones: the parameters they begin with."""


def missing(module: ModuleType) -> list[str]:
    """What of `RELIED_ON` a version's `megatron.training.training` does not have, in words."""
    problems = []
    for name, expected in RELIED_ON.items():
        function = getattr(module, name, None)
        if not callable(function):
            problems.append(f"there is no {name}")
            continue
        wanted = expected.split()
        found = list(inspect.signature(function).parameters)
        if found[: len(wanted)] != wanted:
            problems.append(f"{name} begins with ({', '.join(found)}), not with ({', '.join(wanted)})")
    return problems


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _escape_percent(arguments: ModuleType) -> None:
    def escaping(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_megatron_arguments(parser: Any) -> Any:
            parser = original(parser)
            for action in parser._actions:
                if action.help and "10%)" in action.help:
                    action.help = action.help.replace("10%)", "10%%)")
            return parser

        return add_megatron_arguments

    patched.HELP.wrap(escaping, of=arguments)


ENTRIES = (
    Entry(
        versions=("0.18", "0.19"),
        module="megatron.training.arguments",
        what="a bare % in the help of --moe-paged-stash-buffer-size-factor-cuda is doubled",
        reason="argparse takes it for a format: --help ends in a ValueError and shows no flag, ours included",
        apply=_escape_percent,
    ),
)

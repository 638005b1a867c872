"""Jobs as `ftctl plan` is told of them, by flags of both frameworks."""

from __future__ import annotations

import argparse

import ft_deepspeed.planner
import ft_megatron.planner
from ft_core.cli.planner import command
from ft_core.cli.planner.shape import PlannedJob

FRAMEWORKS = (ft_deepspeed.planner.FRAMEWORK, ft_megatron.planner.FRAMEWORK)


def described(*flags: str) -> PlannedJob:
    """Raises ConfigError for flags that clash."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, FRAMEWORKS)
    return command.described(parser.parse_args([word for some in flags for word in some.split()]), FRAMEWORKS)


def parameters(job: PlannedJob, stage: int = 0) -> int:
    """Of a role of a stage."""
    return sum(tensor.parameters for tensor in job.model.tensors(stage))

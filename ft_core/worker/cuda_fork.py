"""CUDA does not survive a fork, and workers are forked from a process that has the script's imports done.

An import must not use the GPU, then. Asking whether there is one is enough to spoil it, unless torch asks
NVML (PYTORCH_NVML_BASED_CUDA_CHECK, which agents set). What did all the same is found out by trying: torch
marks a child that cannot use CUDA.
"""

from __future__ import annotations

import os
import sys

from ft_core.errors import ConfigError

_culprit = ""
"""What has initialized CUDA in the process that workers come from."""


def look(name: str) -> bool:
    """In the fork server: whether `name`, just imported, has done it."""
    global _culprit
    torch = sys.modules.get("torch")
    if _culprit or torch is None or torch.version.cuda is None:
        return False
    if torch.cuda._device_count_nvml() <= 0:
        return False  # no GPU: torch asks the driver after all, which spoils nothing
    if (child := os.fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    if os.waitpid(child, 0)[1]:
        _culprit = name
    return bool(_culprit)


def broken() -> bool:
    """In a worker: whether it cannot use CUDA."""
    return bool(_culprit)


def check() -> None:
    """In a worker: raises ConfigError if it cannot use CUDA."""
    if _culprit:
        raise ConfigError(
            f"importing {_culprit} initializes CUDA, and no worker can use a GPU then: workers are forks of "
            "a process that has imported what the script imports at its top level. Import it inside a "
            "function, or have it leave the GPU alone until it is called"
        )

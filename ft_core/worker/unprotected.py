"""Torch's own data parallelism under `ftrun`: it runs as under torchrun, and any failure ends the job.

Torch's reducer exchanges gradients by itself, in steps that no adapter sees. So a script that wraps its
model in it has no step that could be done again, and is told so once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from ft_core import patched
from ft_core.import_hook import after_import
from ft_core.worker.session import Session


def install(session: Session) -> None:
    """Have the session know when a model is wrapped. Once per process."""

    def noticing(name: str, wrap: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not session.protecting:
                session.unprotected(f"a model is wrapped in torch's {name}, whose steps cannot be done again")
            return wrap(*args, **kwargs)

        return wrapped

    def patch(fsdp: ModuleType) -> None:
        patched.FSDP.wrap(partial(noticing, "FullyShardedDataParallel"))
        patched.FULLY_SHARD.wrap(partial(noticing, "fully_shard"), of=fsdp)

    patched.DDP.wrap(partial(noticing, "DistributedDataParallel"))
    after_import("torch.distributed.fsdp", patch)

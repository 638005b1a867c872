"""Torch's own data parallelism under `ftrun`: it runs as under torchrun, and any failure ends the job.

Torch's reducer exchanges gradients by itself, in steps that no adapter sees. So a script that wraps its
model in it has no step that could be done again, and is told so once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ft_core.import_hook import after_import
from ft_core.worker.session import Session


def install(session: Session) -> None:
    """Have the session know when a model is wrapped. Once per process."""

    def told(wrap: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(wrap)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not session.protecting:
                session.unprotected(f"a model is wrapped in torch's {name}, whose steps cannot be done again")
            return wrap(*args, **kwargs)

        return wrapped

    def patch(fsdp: ModuleType) -> None:
        module: Any = fsdp
        kind = module.FullyShardedDataParallel
        kind.__init__ = told(kind.__init__, kind.__name__)
        module.fully_shard = told(module.fully_shard, "fully_shard")

    ddp: Any = DistributedDataParallel
    ddp.__init__ = told(ddp.__init__, ddp.__name__)
    after_import("torch.distributed.fsdp", patch)

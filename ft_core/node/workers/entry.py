"""What a worker's process begins with, and all of it that its agent imports: the rest needs torch."""

from __future__ import annotations

from typing import Any, NoReturn


def main(*arguments: Any) -> NoReturn:
    """Be a worker: see `worker.entry`, which the fork server has imported."""
    from ft_core.worker import entry

    entry.main(*arguments)

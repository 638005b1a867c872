"""The smallest protected script, as the tests start it: see `chaos/loading.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Loading:
    """Data parallelism alone, with a loader that has processes."""

    more: tuple[str, ...] = ()
    world: int = 2

    def __str__(self) -> str:
        return "".join(self.more)

    @property
    def script(self) -> Path:
        return Path(__file__).parent / "chaos" / "loading.py"

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return [f"--train-iters={iterations}", *self.more, *["--ft"] * protected]

    def environment(self) -> dict[str, str]:
        return {"PYTHONWARNINGS": "default::UserWarning"}

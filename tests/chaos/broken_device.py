"""`paced`, on nodes of which one has a device that is broken: whoever uses it fails, as CUDA says that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import paced
import pretrain_gpt_core as recipe
from whereabouts import node

BROKEN = "FT_TESTS_BROKEN"
"""The environment variable that names the file which says on which node it is, once it is."""


class Trainer(paced.Trainer):
    """Launches what the device does not take."""

    def forward_step(self, *args: Any) -> Any:
        """As the recipe's."""
        where = Path(os.environ[BROKEN])
        if where.exists() and where.read_text() == node():
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().forward_step(*args)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()

"""The DeepSpeed recipe as it is late in a job: most results of earlier steps are in a tensor of their own."""

from __future__ import annotations

from typing import Any

import resting_clm

from ft_deepspeed import results

recipe = resting_clm.recipe


class Trainer(resting_clm.Trainer):
    """Keeps few calls at hand, as if the job had made thousands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        results.RECENT = 12
        super().__init__(*args, **kwargs)


if __name__ == "__main__":
    recipe.Trainer = Trainer  # type: ignore[misc]
    recipe.main()

"""`paced`, on nodes of which some compute wrongly whenever they are checked."""

from __future__ import annotations

import paced
import pretrain_gpt_core as recipe

import tests.wrong_answers  # noqa: F401 - in the fork server, which has it from here

if __name__ == "__main__":
    recipe.Trainer = paced.Trainer  # type: ignore[misc]
    recipe.main()

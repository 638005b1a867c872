"""Megatron's recipe, in which failures happen: see `failing`."""

from __future__ import annotations

import failing
import pretrain_gpt_core

if __name__ == "__main__":
    failing.begin()
    pretrain_gpt_core.main()
    failing.end()

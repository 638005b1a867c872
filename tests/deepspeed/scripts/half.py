"""pretrain_clm.py where DeepSpeed is told that the CPU can compute in float16. It can; it is slow at it."""

from __future__ import annotations

import pretrain_clm
from deepspeed.accelerator import get_accelerator


def main() -> None:
    """As the recipe's."""
    type(get_accelerator()).is_fp16_supported = lambda self: True
    pretrain_clm.main()


if __name__ == "__main__":
    main()

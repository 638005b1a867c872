"""DeepSpeed's recipe, in which failures happen: see `failing`."""

from __future__ import annotations

import failing
import pretrain_clm

if __name__ == "__main__":
    failing.begin()
    pretrain_clm.main()
    failing.end()

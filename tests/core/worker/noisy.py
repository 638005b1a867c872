"""Imported by a script, prints as libraries do: on rank 0 alone, if it is told which it is."""

from __future__ import annotations

import os
import warnings

if "QUIET" not in os.environ:
    warnings.warn("as all do", stacklevel=1)
    if os.environ.get("RANK", "0") == "0":
        print("imported", flush=True)
        os.system("echo imported by C")

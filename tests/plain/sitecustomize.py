"""Python runs this first in every process of a plain job: its workers leave once they have done their work.

torch sometimes aborts a process that has done all its work, while the interpreter takes it down ("terminate
called without an active exception"; one run in thirty on a loaded machine). What has no plugin is judged by
what it printed, so its workers leave before that.
"""

import atexit
import os
import sys


def leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_type") else 0)


if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:  # what forks ranks has none
    atexit.register(leave)

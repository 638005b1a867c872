"""What tests need of a real etcd, where Debian's `etcd-server` is installed."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.etcd_members import Members as Members

needed = pytest.mark.skipif(shutil.which("etcd") is None, reason="left out: there is no etcd (etcd-server)")

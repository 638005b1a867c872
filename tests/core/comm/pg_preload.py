"""Imported by the fork server of the process-group tests."""

from __future__ import annotations

from ft_core.comm import process_group  # noqa: F401

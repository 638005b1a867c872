"""Imported by an agent's fork server, which has the script's imports done then."""

from ft_core.node.workers import preload

preload.main()

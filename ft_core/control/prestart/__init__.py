"""Roles that are begun ahead of need: those that come back, and those of nodes that are drained."""

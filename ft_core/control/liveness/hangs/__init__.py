"""Hangs: who waits for whom, who is to blame, and when that is certain enough."""

"""A node's memory of snapshots: its own, and copies for others."""

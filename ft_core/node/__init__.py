"""The agent: one process per node. Workers, their memory, replication, reports."""

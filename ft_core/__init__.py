"""The engine: epochs, snapshots, replicas and repairable process groups. Knows no training framework."""

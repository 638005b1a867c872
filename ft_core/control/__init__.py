"""The controller: one process per job. Membership, detection, decisions; control messages only."""

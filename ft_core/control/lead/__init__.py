"""Which process leads the job: by election, as long as it renews its lease."""

"""Which process leads the job, and how another takes over."""

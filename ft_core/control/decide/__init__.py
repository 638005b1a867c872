"""From which version the job goes on, and who plays which role where."""

"""What every process of a job needs: a clock, writers that nobody waits for, tasks that do not die unseen."""

"""`ftctl doctor`: what on a machine, or in a job, would keep a recovery from working."""

"""Who lives, who is slow, who hangs, and what has failed where."""

"""The user's process: its link to the agent, the step, the recovery, output."""

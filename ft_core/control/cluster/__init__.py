"""What is known of the job: its nodes, the plan, what roles hold, and how far they are."""

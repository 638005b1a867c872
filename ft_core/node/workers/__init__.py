"""A node's workers: their processes, and what is known of them."""

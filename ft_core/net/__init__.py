"""Moving bytes between nodes."""

"""`ftrun` and `ftctl`: what a person types."""

"""What a node's devices say of themselves."""

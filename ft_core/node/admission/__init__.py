"""Whether this node is well: what is checked of it before it is given roles."""

"""A node's connection with the controller, and with other nodes."""

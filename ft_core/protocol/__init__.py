"""What the processes of a job say to each other, and how: messages, framing, handshake, listeners."""

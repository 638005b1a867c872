"""What a version of the state consists of, and where it is kept: memory, copies, storage."""

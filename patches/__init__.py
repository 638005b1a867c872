"""What an unmodified upstream needs, by upstream and version; each small, each with the reason it exists."""

"""Process groups that outlive their communicators, and the replay of start-up collectives."""

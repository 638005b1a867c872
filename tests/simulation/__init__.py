"""The machines of controller and agents in one process, on a virtual clock, under a seeded scheduler.

Nothing in here opens a socket or starts a process, and all that looks random comes from the seed: a
schedule that failed once fails again.
"""

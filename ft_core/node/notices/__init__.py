"""Who announces that this machine is about to go: clouds, schedulers, the operator (`--ft-notices`).

Each is a `Source` (`notice`), asked again and again in a task of the agent's event loop (`watch`): nothing
here blocks that, delays a start, or costs anything where there is nobody to ask. What is made of a notice is
the controller's business (`control.prestart.notices`).
"""

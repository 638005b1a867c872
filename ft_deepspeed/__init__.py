"""DeepSpeed that survives failures, by a section in its JSON.

Importing this package installs the hooks, as `ftrun` does for every script.
"""

from ft_deepspeed.hooks import install

install()

"""DeepSpeed that survives failures, by a section in its JSON. Importing this installs the hooks, as ftrun does."""

from ft_deepspeed.hooks import install

install()

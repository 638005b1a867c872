"""Importing this module installs `ft_megatron.cpu_shadow`.

For scripts, whose import list then says it all: put it above the first megatron import. A forkserver that
preloads a script's imports in their order thereby installs the shadow in time as well.
"""

from ft_megatron import cpu_shadow

cpu_shadow.install()

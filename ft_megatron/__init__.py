"""Fault tolerance for Megatron-Core and Megatron-LM: the hooks between their training step and `ft_core`."""

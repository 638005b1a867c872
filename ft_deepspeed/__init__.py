"""Hooks into the DeepSpeed engine: its JSON section, ZeRO state, the gradient barrier."""

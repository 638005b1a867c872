"""What the engine does on a GPU, proven by one command: `python -m benchmarks.gpu` (docs/gpu.md)."""

"""Ready to run: one command each for one machine, Slurm, Kubernetes and users of torchrun."""

"""Training scripts on Megatron-Core, from one machine without a GPU upwards."""

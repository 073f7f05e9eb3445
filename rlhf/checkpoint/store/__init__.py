"""Blocks of tensors in files: Megatron-Core's torch_dist format, written and read."""

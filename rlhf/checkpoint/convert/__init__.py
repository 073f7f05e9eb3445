"""Checkpoints of other formats made from checkpoints: the command `rlhf-convert`."""

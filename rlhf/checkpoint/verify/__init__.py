"""Whether two checkpoints hold the same model."""

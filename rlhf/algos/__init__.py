"""Pure RL mathematics on tensors. Knows no process group."""

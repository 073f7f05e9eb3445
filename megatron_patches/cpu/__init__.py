"""Device and RNG changes that let Megatron-Core run on CPUs over gloo."""

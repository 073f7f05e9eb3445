"""What Megatron-Core does not do yet, one fault a file; each change knows the source it was written for."""

"""Megatron-LM's `mp_rank` folders."""
